"""Reads, look-ups, dead-letter topics, and the ends of transactions."""
