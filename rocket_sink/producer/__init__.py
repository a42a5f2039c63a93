"""Name servers, the send engine with its retries, shared health, pool and the public Producer."""
