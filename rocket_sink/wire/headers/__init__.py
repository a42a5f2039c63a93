"""Headers of commands: the value, both ways to write it, and JSON from a peer."""
