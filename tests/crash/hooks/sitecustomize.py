"""Python runs this in each process that has this folder on its path: drivers and workers."""

import os

if os.environ.get("ROCKET_SINK_CRASH"):
    import crash_points

    crash_points.install()
