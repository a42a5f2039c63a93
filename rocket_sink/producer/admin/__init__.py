"""Reading, queries by id, dead-letter topics, and commits of half messages."""
