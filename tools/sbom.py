"""The software bill of materials that goes into the wheel (PEP 770), as CycloneDX.

    python -m tools.sbom            write tools/sbom.cdx.json
    python -m tools.sbom --check    exit 1 when the stored file is not what setup.cfg says

The wheel bundles no work of others, so its components are the requirements. Ranges stand where a
bundled component would have a version. The file has no date and no serial number, because the same
sources have to make the same wheel.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from typing import Final

from tools.setup_cfg import ROOT, project

STORED: Final = ROOT / "tools" / "sbom.cdx.json"
_NOT_FOR_USERS: Final = ("docs", "fuzz", "test")


def version() -> str:
    """Return the version that the package states, without importing it."""
    for node in ast.parse((ROOT / "rocket_sink" / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise LookupError("rocket_sink/__init__.py has no line __version__ = ...")


def requirements() -> dict[str, tuple[str, str]]:
    """Return {name of a requirement: its range, the extra that brings it or nothing}."""
    table = project()
    extras: dict[str, list[str]] = table["optional-dependencies"]
    lists = [("", table["dependencies"])]
    lists += [(name, lines) for name, lines in extras.items() if name not in _NOT_FOR_USERS]
    needs: dict[str, tuple[str, str]] = {}
    for extra, lines in lists:
        for line in lines:
            match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", line)
            assert match is not None, line
            if match[1] != table["name"]:
                needs.setdefault(match[1].lower(), (match[2].strip(), extra))
    return needs


def bill() -> str:
    """Return the bill as JSON."""
    table = project()
    own = f"pkg:pypi/{table['name']}@{version()}"
    components = [
        {
            "type": "library", "bom-ref": f"pkg:pypi/{name}", "name": name,
            "purl": f"pkg:pypi/{name}", "scope": "optional" if extra else "required",
            "properties": [
                {"name": "rocket-sink:range", "value": range_ or "any"},
                *([{"name": "rocket-sink:extra", "value": extra}] if extra else []),
            ],
        }
        for name, (range_, extra) in sorted(requirements().items())
    ]  # fmt: skip
    licence = [{"license": {"id": table["license"]}}]
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": own, "name": table["name"], "version": version(),
                "description": table["description"], "licenses": licence, "purl": own,
            }
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [str(one["bom-ref"]) for one in components]},
            *({"ref": str(one["bom-ref"])} for one in components),
        ],
    }  # fmt: skip
    return json.dumps(content, indent=1) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return int(STORED.read_text("utf-8") != bill())
    STORED.write_text(bill(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
