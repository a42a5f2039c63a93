"""A fuzzing process, because libFuzzer ends the process that it runs in.

    python -m tests.fuzz.one TARGET [libFuzzer's arguments and corpus folders]

TARGET `all` takes the target from the first byte.
"""

import sys

import atheris

with atheris.instrument_imports(include=["rocket_sink"]):
    from tests.fuzz.targets import TARGETS, feed


def entry(name):
    if name != "all":
        target = TARGETS[name]
        return lambda data: feed(target, data) and None
    targets = list(TARGETS.values())
    return lambda data: feed(targets[data[0] % len(targets)], data[1:]) and None if data else None


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], entry(sys.argv[1]))
    atheris.Fuzz()
