"""Checks of blocks that are not run: they parse, and name only commands and options that exist."""

import ast
import configparser
import contextlib
import json
import re
import shlex
import subprocess
import tempfile
from unittest import mock
from xml.etree import ElementTree

import click
import yaml

from rocket_sink.cli import cli
from rocket_sink.commands.common.sink_input import read_conf
from rocket_sink.errors import OptionError
from rocket_sink.options import SinkOptions, find_option
from tests.docs.blocks import ROOT

REDIRECTIONS = (">", ">>", "<", "2>", ">&")
SEPARATORS = ("|", "&&", "||", ";", "&", "(", ")")


class BadBlock(AssertionError):
    """The error of a block that no user could copy."""


_WRONG = (
    BadBlock, OptionError, SyntaxError, ValueError, configparser.Error, yaml.YAMLError,
    ElementTree.ParseError,
)  # fmt: skip


def check_parsed(block):
    """Raise BadBlock if the block does not parse, or names a missing command or option."""
    check = {
        "python": _check_python, "bash": _check_bash, "json": json.loads, "yaml": _check_yaml,
        "ini": _check_ini, "xml": ElementTree.fromstring, "java": _check_java,
    }[block.language]  # fmt: skip
    try:
        check(block.text)
    except _WRONG as error:
        raise BadBlock(f"{block.place}: {error}") from error


def _check_python(text):
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("RocketSink", "Producer", "TableProducer"):
            for keyword in node.keywords:
                if keyword.arg not in ("credentials", "transaction_listener", None):
                    find_option(keyword.arg)


def _check_bash(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise BadBlock(done.stderr)
    for arguments in our_commands(text):
        check_command(arguments)


def our_commands(text):
    """Yield the arguments of each rocket-sink and jobs/*.py in a shell text, with the command."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        tokens = [*lexer, ";"]
        for before, word in zip(["", *tokens], tokens, strict=False):
            if word in REDIRECTIONS or before in REDIRECTIONS:
                continue
            if word not in SEPARATORS:
                words.append(word)
                continue
            yield from _ours(words)
            words = []


def _ours(words):
    if words and re.fullmatch(r"[\w.-]+:\d+", words[0]):
        raise BadBlock(f"{words[0]} would be a command: put name servers in quotes")
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "rocket-sink":
            # The word may also be the name of a package, as after `pip install`.
            if at == 0 or "=" in words[at - 1] or words[at - 1].endswith(("env", "exec", "time")):
                yield words[at + 1 :]
            return
        if word.startswith("jobs/") and word.endswith(".py"):
            if not (ROOT / word).exists():
                raise BadBlock(f"there is no {word}")
            yield [word.removeprefix("jobs/").removesuffix(".py"), *words[at + 1 :]]
            return


def check_command(arguments):
    """Raise BadBlock unless click accepts the arguments and the sink accepts their options."""
    command, context, remaining = cli, None, list(arguments)
    try:
        while True:
            with _no_files():
                context = command.make_context(command.name, remaining, parent=context)
            if not isinstance(command, click.Group):
                break
            remaining = [*context._protected_args, *context.args]
            _, command, remaining = command.resolve_command(context, remaining)
        many, flags = (context.meta.get(f"rocket_sink.{name}", {}) for name in ("many", "flags"))
        SinkOptions.parse({**many, **flags})
    except click.exceptions.Exit:
        return  # --help
    except (click.ClickException, OptionError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else error
        raise BadBlock(f"rocket-sink {shlex.join(arguments)}: {text}") from error


@contextlib.contextmanager
def _no_files():
    """Let commands accept files that do not exist."""
    with (
        mock.patch("rocket_sink.commands.common.sink_input.read_conf", return_value={}),
        mock.patch.object(click.Path, "convert", lambda self, value, *more: value),
        mock.patch.object(click.File, "convert", lambda self, value, *more: value),
    ):
        yield


def _check_yaml(text):
    list(yaml.safe_load_all(text))


def _check_ini(text):
    """Check a configuration file of the sink."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(text)
        file.flush()
        SinkOptions.parse(read_conf(file.name))


def _check_java(text):
    """Check only that the brackets of Java code close; pages show it to readers who know it."""
    for left, right in ("()", "{}", "[]"):
        if text.count(left) != text.count(right):
            raise BadBlock(f"{left} and {right} do not match")
