"""Whole columns of messages to the bytes of requests, without Python per row."""
