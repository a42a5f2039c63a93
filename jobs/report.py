"""spark-submit entry point: show what a ledger says.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/report.py ...

The arguments are those of `rocket-sink report --help`.
"""

import sys

from rocket_sink.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
