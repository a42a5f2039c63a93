"""The only code that touches sockets: connect, TLS, requests and answers, deadlines."""
