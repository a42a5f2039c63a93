"""The Spark lanes beside lanes that do nothing with the same rows."""
