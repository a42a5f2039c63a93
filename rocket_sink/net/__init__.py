"""Connections: the only code that uses sockets (connect, TLS, requests, answers, deadlines)."""
