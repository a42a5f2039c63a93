"""The row contract, its checks, and batches of rows. The package needs no Spark."""
