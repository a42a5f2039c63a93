"""The only code that touches sockets: connect, TLS, pump requests and answers, deadlines."""
