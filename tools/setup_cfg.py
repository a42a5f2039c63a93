"""Reads the package's metadata from setup.cfg, for hatchling and for the bill of materials."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT: Final = Path(__file__).parent.parent


def project() -> dict[str, Any]:
    """Return setup.cfg as a table `project` of pyproject.toml."""
    config = ConfigParser(interpolation=None)
    config.optionxform = str  # type: ignore[assignment,method-assign]
    config.read_string((ROOT / "setup.cfg").read_text("utf-8"))
    metadata, options = config["metadata"], config["options"]
    return {
        "name": metadata["name"],
        "description": metadata["description"],
        "requires-python": options["python_requires"],
        "license": metadata["license"],
        "license-files": _lines(metadata["license_files"]),
        "authors": [{"name": metadata["author"]}],
        "keywords": metadata["keywords"].split(", "),
        "classifiers": _lines(metadata["classifiers"]),
        "urls": _pairs(metadata["project_urls"]),
        "scripts": _pairs(config["options.entry_points"]["console_scripts"]),
        "dependencies": _lines(options["install_requires"]),
        "optional-dependencies": {
            extra: _lines(text) for extra, text in config["options.extras_require"].items()
        },
    }


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(" = ") for line in _lines(text))}


class SetupCfg(MetadataHookInterface):
    """Gives hatchling what pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata.update({name: value for name, value in project().items() if name != "name"})
