"""Configuration files: `name = value` lines with `#` comments."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Final

from rocket_sink.errors import OptionError
from rocket_sink.options import find_option

_TOP: Final = "\0top"


def read_conf(path: str | Path) -> dict[str, str]:
    """Return {option name: text} of a configuration file; values are not parsed.

    Raises:
        OptionError: the file is unreadable or malformed, or has an unknown or repeated option.
    """
    parser = _parsed(Path(path))
    values: dict[str, str] = {}
    for section in parser.sections():
        for name, value in parser.items(section):
            try:
                option = find_option(name)
            except OptionError as error:
                where = path if section == _TOP else f"{path} [{section}]"
                raise OptionError(f"{where}: {error}", option=name) from None
            if option.name in values:
                raise OptionError(f"{path}: option {option.name} is given twice", option=name)
            values[option.name] = value
    return values


def _parsed(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#",), default_section="\0none"
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
        # Lines before the first heading belong to a section with a name that no file can have.
        parser.read_string(f"[{_TOP}]\n{text}", source=str(path))
    except OSError as error:
        raise OptionError(
            f"cannot read the configuration {path}: {error.strerror}; rocket-sink options --conf "
            "--out FILE makes one"
        ) from None
    except (configparser.Error, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise OptionError(
            f"{path} is not a configuration of 'name = value' lines: {line}"
        ) from None
    return parser
