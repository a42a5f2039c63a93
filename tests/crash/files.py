"""Files as signals between the harness and its drivers."""

import time

WAIT_S = 900.0


def write_whole(path, text):
    """Write a file at once, so that readers see all of it or none."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    partial.rename(path)


def await_file(path):
    """Wait for a file; raise TimeoutError if nobody writes it."""
    until_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)
