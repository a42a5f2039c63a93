"""spark-submit entry point: measure the sink beside a sink that does nothing.

    spark-submit --packages io.delta:delta-spark_2.13:4.4.0 jobs/benchmark.py ...

The arguments are those of `rocket-sink benchmark --help`.
"""

import sys

from rocket_sink.cli import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
