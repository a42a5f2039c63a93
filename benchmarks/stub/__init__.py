"""A cluster of many brokers that only answer, for the scaling curves."""
