"""The Spark lanes, and no-op lanes with the same rows."""
