"""Our producer as a process of its own: see `benchmarks.sender.__main__`."""
