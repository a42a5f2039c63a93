"""The public Producer, the send engine with its retries, and the pool of engines."""
