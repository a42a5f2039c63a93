"""What the driver found out about a frame's columns: small, pickles, goes to the tasks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnPlan:
    """Where each column of the row contract comes from; made by `contract.resolve_columns`.

    `sources` is (contract column, name in the frame) for each that there is; `topic` the option's,
    or "" when the column decides; `json_columns` the columns that `bodyFormat=json` packs, if set.
    """

    sources: tuple[tuple[str, str], ...]
    topic: str = ""
    json_columns: tuple[str, ...] = ()

    @property
    def needs_to_json(self) -> bool:
        """The frame must go through `frames.pack_json` on the driver before tasks see it."""
        return bool(self.json_columns)

    @property
    def needed(self) -> tuple[str, ...]:
        """The frame's columns that tasks read, each once (after `pack_json` where needed)."""
        return tuple(dict.fromkeys(source for _, source in self.sources))

    def source(self, column: str) -> str | None:
        """The frame's name of a contract column, or None."""
        return dict(self.sources).get(column)
