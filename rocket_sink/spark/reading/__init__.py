"""Reading topics with Spark: `spark.read` and `spark.readStream`."""
