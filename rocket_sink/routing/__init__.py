"""Pure decisions: which queue, which broker, how healthy, and what to do after an answer.

Nothing here opens a socket, reads a clock, draws from a global generator, starts a thread or
logs: `now_s` (monotonic seconds) and `rng` are arguments, and every answer is a value.
`tests/test_layers.py` reads the imports and holds this package to it.
"""
