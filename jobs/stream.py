"""spark-submit entry point: stream rows of any source into RocketMQ.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/stream.py --format parquet ...

The arguments are those of `rocket-sink stream --help`.
"""

import sys

from rocket_sink.cli import main

if __name__ == "__main__":
    sys.exit(main(["stream", *sys.argv[1:]]))
