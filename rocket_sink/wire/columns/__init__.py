"""Encoding of whole columns of messages to the bytes of requests, without Python code per row."""
