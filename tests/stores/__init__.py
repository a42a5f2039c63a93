"""Ledgers on an S3 API: a server on loopback, Spark with S3A, drivers that contend, many epochs."""
