"""Other producers: the Java client, the gRPC client, Spark's Kafka sink."""
