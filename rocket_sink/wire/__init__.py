"""RocketMQ's remoting protocol, pure: bytes in, values out.

Rules for all modules: no socket, clock, thread, log or randomness; the caller passes times and
addresses. Bytes of a peer give a value or `RemoteProtocolError`, never another exception. A value
that the protocol cannot express gives `LocalProtocolError` before any byte is written."""
