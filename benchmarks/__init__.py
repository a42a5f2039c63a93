"""Comparison benchmarks: the sink against a no-op sink and other producers.

From a checkout: `python -m benchmarks --help`. See README.md here.
"""
