"""The command line: `rocket-sink COMMAND`.

A command's module is imported when the command runs or prints its help. So `rocket-sink --help`
imports no Spark, Arrow or table library. Exit codes: 0 success; 1 failure, with one line on stderr;
2 wrong command line or option; 130 stopped by the user. Only `--debug` prints tracebacks."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from rocket_sink import __version__
from rocket_sink.commands.common.base import LazyGroup, debug_wanted, one_line, usage_line
from rocket_sink.commands.common.output import (
    escape_what_streams_lack,
    ignore_odd_sizes,
    note,
    note_lines,
)
from rocket_sink.errors import OptionError, RocketSinkError
from rocket_sink.text import clean_trace

COMMANDS: Final = {
    "demo": "Stream a year of flights into a local cluster, break a broker, count.",
    "cluster": "Start, inspect and stop a local RocketMQ cluster.",
    "check": "Check whether name servers, brokers and topic are ready.",
    "topic": "Create topics on all brokers of a cluster, show and list them.",
    "send": "Send messages from the command line or from standard input.",
    "tail": "Print the messages of a topic, and wait for new ones.",
    "stream": "Stream rows of any Spark source into a topic.",
    "backfill": "Send the pending dead letters of a ledger again, or the rows of any table, once.",
    "dlq": "Look into the dead letters of consumer groups, export them, send them again.",
    "transactions": "List and settle open transactions of a ledger, and answer for them.",
    "verify": "Check that each acknowledged message is in its topic once.",
    "report": "Show what a ledger says about sends, failures and brokers.",
    "tune": "Suggest latency options by what a ledger has recorded.",
    "ledger": "Fold, show and maintain a ledger.",
    "options": "List every option of the sink, or write a configuration.",
}
"""{command: its line in --help}. The module and its click command have the command's name."""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="rocket-sink")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails."
)
def cli() -> None:
    """Send Spark rows to Apache RocketMQ, and account for every one of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run(cli, "rocket-sink", arguments)


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run `command` under this name; return the exit code. `arguments` replaces `sys.argv`."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    escape_what_streams_lack()
    ignore_odd_sizes()
    try:
        answer = command.main(args=argv, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except (click.Abort, KeyboardInterrupt):
        note("rocket-sink: stopped")
        return 130
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            note_lines(click.unstyle(error.format_message()))
        else:
            note(usage_line(error))
        return error.exit_code
    except Exception as error:
        return _report_failure(error, argv)
    return answer if isinstance(answer, int) else 0


def _report_failure(error: Exception, argv: Sequence[str]) -> int:
    if debug_wanted(argv):
        note_lines(clean_trace("".join(traceback.format_exception(error))))
    note(f"rocket-sink: {one_line(error)}")
    if not isinstance(error, RocketSinkError) and not debug_wanted(argv):
        note("rocket-sink: --debug shows where it comes from")
    return 2 if isinstance(error, OptionError) else 1


def _forget_stdout() -> None:
    """Discard further output, also at exit. The reader of the pipe has ended, as in `| head`."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
