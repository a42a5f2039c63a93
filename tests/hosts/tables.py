"""Results of runs, stored as JSON and shown as Markdown on pages that people write."""

import json

_COLUMNS = {
    "sent": "sent", "pause_ms": "pause s", "failed": "failed", "lost": "lost",
    "announced": "announced", "doubled": "doubled", "unannounced": "in silence",
}  # fmt: skip


def store(path, results, *, whole):
    """Write results. Unless `whole`, replace only the stored cases of the same names."""
    cases = list(results["cases"])
    if not whole and path.exists():
        older = json.loads(path.read_text())["cases"]
        new = {case["name"]: case for case in cases}
        cases = [new.pop(case["name"], case) for case in older] + list(new.values())
    path.write_text(json.dumps({**results, "cases": cases}, indent=1) + "\n")


def with_part(page, name, text):
    """Return the text of a page with another part between the marks of this name."""
    before, begin, from_mark = page.partition(f"<!-- {name}: made by ")
    made_by, _, from_part = from_mark.partition("-->\n")
    _, end, after = from_part.partition(f"<!-- /{name} -->")
    assert begin and end, f"the page has no marks of {name}"
    return f"{before}{begin}{made_by}-->\n{text}{end}{after}"


def write_parts(page, parts):
    """Replace parts of a page: {name: text}."""
    text = page.read_text()
    for name, part in parts.items():
        text = with_part(text, name, part)
    page.write_text(text)


def figures(row):
    """Return a line of figures for people who watch."""
    return " ".join(f"{name}={row[name]}" for name in (*_COLUMNS, "denied", "degraded", "back_ms"))


def lines(head, rows):
    """Return a Markdown table."""
    parts = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(part) + " |\n" for part in parts)


def verdicts(cases, limits, **more):
    """Return a table with a line per case: ranges or sums of figures, and broken promises.

    Args:
        limits: the promises for a case that is `covered`, `may_fail`, or else `open`.
        more: further figures and their headings.
    """
    columns = {**_COLUMNS, **more}
    del columns["sent"]
    rows = []
    for case in cases:
        rows_by_mode = case["rows"]
        broken = [f"{mode}: {text}" for mode, row in rows_by_mode.items() for text in row["broken"]]
        rows.append([
            case["title"], limits[_promise(case)],
            "; ".join(broken) or "held",
            *(_all(name, rows_by_mode.values()) for name in columns),
        ])  # fmt: skip
    head = ["case", "promise", "held", *columns.values()]
    return lines(head, rows)


def _promise(case):
    return "covered" if case["covered"] else "may_fail" if case["may_fail"] else "open"


def modes(cases, **more):
    """Return a table per case, with a line per mode; `more` as in `verdicts`."""
    columns = {**_COLUMNS, **more}
    texts = []
    for case in cases:
        options = ", ".join(f"{name}={value}" for name, value in case["options"].items())
        rows = [
            [mode, *(_figure(name, row[name]) for name in columns)]
            for mode, row in case["rows"].items()
        ]  # fmt: skip
        head = f"**{case['title']}**" + (f" ({options})" if options else "")
        texts.append(f"{head}\n\n{lines(['mode', *columns.values()], rows)}")
    return "\n".join(texts)


def _figure(name, value):
    if value is None:
        return ""
    return f"{value / 1000:.1f}" if name.endswith("_ms") else str(value)


def _all(name, rows):
    values = [row[name] for row in rows if row[name] is not None]
    if not name.endswith("_ms"):
        return str(sum(values))
    ends = sorted({_figure(name, value) for value in (min(values), max(values))}) if values else []
    return " to ".join(ends)
