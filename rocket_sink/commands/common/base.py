"""Command and group classes: an example in every help, `--debug` everywhere, lazy imports."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click


class Command(click.Command):
    """A command with an example in its help; it also takes `--debug` after its name."""

    DEBUG: ClassVar[str] = "rocket_sink.debug"

    def __init__(self, *arguments: Any, example: str = "", **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.example = example
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True))

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example, one command per line, unwrapped."""
        super().format_epilog(context, formatter)
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n" if line.strip() else "\n")


class Group(click.Group):
    """A group whose commands are ours."""

    command_class = Command

    def list_commands(self, context: click.Context) -> list[str]:
        """The names in the order in which they are defined."""
        return list(self.commands)


class LazyGroup(Group):
    """A group that knows its commands' names and one-line helps, and imports them on use."""

    def __init__(self, *arguments: Any, lazy: Mapping[str, tuple[str, str]], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.lazy = lazy

    def list_commands(self, context: click.Context) -> list[str]:
        """The names in the order in which people meet them."""
        return [*self.lazy, *super().list_commands(context)]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one suggest the nearest."""
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(context), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no such command {name!r}{hint}", context)
        return super().resolve_command(context, args)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command, or None."""
        if name not in self.lazy:
            return super().get_command(context, name)
        module, _, attribute = self.lazy[name][0].partition(":")
        found = getattr(importlib.import_module(f"rocket_sink.commands.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])


def debug_wanted(arguments: Sequence[str]) -> bool:
    """Read from the raw arguments: a command line that fails to parse may ask for it as well."""
    before_end = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--debug" in before_end
