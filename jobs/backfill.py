"""spark-submit entry point: send the pending dead letters of a ledger again.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/backfill.py ...

The arguments are those of `rocket-sink backfill --help`.
"""

import sys

from rocket_sink.cli import main

if __name__ == "__main__":
    sys.exit(main(["backfill", *sys.argv[1:]]))
