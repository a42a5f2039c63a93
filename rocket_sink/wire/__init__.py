"""RocketMQ's remoting protocol, pure: bytes in, values out.

Rules for everything below: no socket, clock, thread, log or randomness; the caller passes times
and addresses in. Bytes that a peer sent give a value or `RemoteProtocolError`, never another
exception. What we cannot say on the wire is `LocalProtocolError`, raised before a byte is made.
"""
