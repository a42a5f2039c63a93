"""The send engine."""
