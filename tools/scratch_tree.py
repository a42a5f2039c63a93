"""A copy of the working tree, in which mistakes are planted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def copy_tree(root: Path, tree: Path) -> None:
    """Copy the files of the repository `root` that git tracks or would add."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in dict.fromkeys(names.split("\0")):
        if name and (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


def write_source(path: Path, text: str) -> None:
    """Change a source so that Python compiles it anew."""
    path.write_text(text)
    # Python compares only the second and the size of a source with those in its stored module.
    for stored in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        stored.unlink()
