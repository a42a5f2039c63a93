"""Comparison benchmarks: the sink beside a sink that does nothing, and beside other producers.

From a checkout: `python -m benchmarks --help`. See README.md here.
"""
