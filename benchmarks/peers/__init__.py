"""Producers to compare with: the Java client, the gRPC client, Spark's Kafka sink."""
