"""The sources: files of numbered rows that keep arriving, and the files that epochs cover.

A row's key follows from its number. A key's rows are in one file of `TOGETHER` successive ones, the
most that an epoch takes: tasks of an epoch do not wait for each other.
"""

import json

from tests.crash.files import write_rows

KEYS = 50
TOGETHER = 4


class Source:
    """A lane's files; only one thread writes."""

    def __init__(self, folder, rows):
        self.folder = folder / "source"
        self.folder.mkdir(parents=True)
        self._checkpoint = folder / "checkpoint"
        self._part = folder / "part"
        self.rows = rows
        self.files = 0

    def write(self):
        """Write the next file."""
        numbers = range(self.files * self.rows, (self.files + 1) * self.rows)
        write_rows(self._part, [self.key(number) for number in numbers], numbers, self.files)
        self._part.rename(self.folder / f"{self.files:08d}.parquet")
        self.files += 1

    def key(self, number):
        file = number // self.rows
        return f"k{number % (KEYS // TOGETHER)}-{file % TOGETHER}"

    @property
    def written(self):
        """The number of rows."""
        return self.files * self.rows

    def epochs(self):
        """Return the number of epochs that Spark has committed."""
        return self._committed() + 1

    def covered(self):
        """Return the number of files in committed epochs, which are the first ones."""
        last, paths = self._committed(), set[str]()
        try:
            logs = sorted((self._checkpoint / "sources" / "0").iterdir(), key=_number)
            compacts = [log for log in logs if log.suffix == ".compact" and _number(log) <= last]
            first = compacts[-1:]
            since = _number(first[0]) if first else -1
            for log in [*first, *(log for log in logs if since < _number(log) <= last)]:
                for line in log.read_text().splitlines()[1:]:
                    paths.add(json.loads(line)["path"])
        except OSError:
            # Spark deletes a log that a newer one has replaced: the next look will succeed.
            return 0
        return len(paths)

    def _committed(self):
        folder = self._checkpoint / "commits"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)


def _number(log):
    """Return the number of a log file; -1 for other files, which come first and do not count."""
    stem = log.name.removesuffix(".compact")
    return int(stem) if stem.isdigit() else -1
