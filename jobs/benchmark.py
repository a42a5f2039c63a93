r"""spark-submit entry point: measure sending to your own cluster, lanes with --lane.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/benchmark.py \
      -n 10.0.0.1:9876 -t benchmark --lane foreach

The arguments are those of `rocket-sink benchmark --help`.
"""

import sys

from rocket_sink.cli import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
