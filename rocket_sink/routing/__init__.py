"""Pure functions: queue selection, broker isolation, rate limits, and retries.

No sockets, clocks, global random generators, threads or logs: `now_s` (monotonic seconds) and `rng`
are arguments. `tests/test_layers.py` checks that.
"""
