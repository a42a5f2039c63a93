"""Configuration files and generated tables: they say what options.py says."""

import re
from pathlib import Path

import pytest

from rocket_sink.commands.common.sink_input import read_conf
from rocket_sink.commands.options import conf_text, default_text
from rocket_sink.errors import OptionError
from rocket_sink.options import GROUPS, OPTIONS, SinkOptions, find_option, options_in
from tests.run_command import run_command

ROOT = Path(__file__).parents[2]


def test_the_stored_configuration_is_up_to_date():
    stored = (ROOT / "conf" / "rocket-sink.conf").read_text(encoding="utf-8")
    assert stored == conf_text(), "run: rocket-sink options --conf --out conf/rocket-sink.conf"


def test_the_ci_runs_the_readmes_test_command():
    last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()[-1]
    assert f"\n{last}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pytest" in last


def test_every_default_can_be_read_back(tmp_path):
    path = tmp_path / "all.conf"
    lines = [f"{o.name} = {default_text(o)}" for o in OPTIONS if default_text(o)]
    path.write_text("\n".join(lines))
    assert SinkOptions.parse(read_conf(path)) == SinkOptions.parse({})


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("name_server = a:1\n# a comment\nSENDMSGTIMEOUT=5s\ncolumns = body=payload\n",
         {"nameServer": "a:1", "sendMsgTimeout": "5s", "columns": "body=payload"}),
        ("appId = load\n[options]\ntopic = t\n[DEFAULT]\nledger = /l\n",
         {"appId": "load", "topic": "t", "ledger": "/l"}),
        ("\ufefftopic = t\r\n", {"topic": "t"}),
    ],
    ids=["any spelling", "any section", "byte order mark"],
)  # fmt: skip
def test_what_a_file_may_look_like(text, options, tmp_path):
    path = tmp_path / "one.conf"
    path.write_bytes(text.encode())
    assert read_conf(path) == options


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("nameServr = a", "nameServr", ["bad.conf: ", "nameServr", "did you mean"]),
        ("[message]\nnosuch = a", "nosuch", ["bad.conf [message]: ", "nosuch"]),
        ("topic = a\n[message]\nTOPIC = b", "TOPIC", ["topic", "twice"]),
        ("just words", None, ["name = value"]), ("\udcff = a", None, ["name = value"]),
    ],
)  # fmt: skip
def test_a_malformed_file_is_explained(text, name, words, tmp_path):
    path = tmp_path / "bad.conf"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(OptionError) as caught:
        read_conf(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert caught.value.facts.get("option") == name


def test_no_secret_stands_in_the_example_values():
    for name in ("accessKey", "secretKey", "securityToken", "tlsKeyPassword"):
        (line,) = re.findall(rf"^#{name} = (.*)$", conf_text(), re.MULTILINE)
        assert line.startswith(("env:", "file:")), find_option(name)


@pytest.mark.parametrize("group", GROUPS)
def test_options_of_a_group(group, tmp_path):
    wanted = options_in([group])
    shown = run_command("options", "--group", group).out
    assert all(re.search(rf"\b{option.name}\b", shown) for option in wanted)
    assert shown.count("what it is") == 1 and shown.startswith(group)
    rows = run_command("options", "--group", group, "--json").json()
    assert [row["name"] for row in rows] == [option.name for option in wanted]
    assert all(row["group"] == group and row["help"] for row in rows)
    assert run_command("options", "--group", group, "--conf").code == 2
    everything = run_command("options").out
    assert everything.count("what it is") == len(GROUPS)
    file = tmp_path / "sink.conf"
    assert run_command("options", "--conf", "--out", str(file)).err == f"written to {file}\n"
    assert file.read_text() == conf_text() == run_command("options", "--conf").out
