"""Decisions without side effects: queue selection, broker isolation, rate limits, and retries.

The modules use no sockets, clocks, global random generators, threads or logs: `now_s` (monotonic
seconds) and `rng` are arguments. `tests/test_layers.py` checks that.
"""
