"""The memory of a piece of code, counted by Python itself, and of a process."""

import tracemalloc
from contextlib import contextmanager

MIB = 1 << 20
PEAK_MB = """
def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
"""
"""For a program that a test starts: the largest resident set that the process had (MB). Its
`ru_maxrss` would include the memory of the test's process."""


@contextmanager
def memory_below(limit):
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak / MIB:.0f} MiB"
