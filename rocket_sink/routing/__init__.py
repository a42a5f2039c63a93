"""Decisions without side effects: queue selection, broker isolation, rate limits, and retries.

The modules use no sockets, clocks, global random generators, threads or logs: callers pass `now_s`
(monotonic seconds) and `rng`. `tests/test_layers.py` checks that."""
