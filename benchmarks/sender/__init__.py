"""Our producer as a separate process: see `benchmarks.sender.__main__`."""
