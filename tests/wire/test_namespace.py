"""Topic and group names with a namespace."""

import pytest

from rocket_sink.message_rules import with_namespace, without_namespace

INSTANCE = "MQ_INST_XXX"
PAIRS = [
    ("TOPIC_XXX", "MQ_INST_XXX%TOPIC_XXX"),
    ("GID_XXX", "MQ_INST_XXX%GID_XXX"),
    ("%RETRY%GID_XXX", "%RETRY%MQ_INST_XXX%GID_XXX"),
    ("%DLQ%GID_XXX", "%DLQ%MQ_INST_XXX%GID_XXX"),
]


@pytest.mark.parametrize(("bare", "full"), PAIRS)
def test_c55_a_namespace_comes_once(bare, full):
    assert with_namespace(INSTANCE, bare) == full
    assert with_namespace(INSTANCE, full) == full
    assert without_namespace(INSTANCE, full) == without_namespace(INSTANCE, bare) == bare
    assert without_namespace("", full) == full


@pytest.mark.parametrize("name", ["rmq_sys_topic", "TBW102", "CID_RMQ_SYS_TRANS", ""])
def test_c55_the_systems_names_have_none(name):
    assert with_namespace(INSTANCE, name) == name


def test_no_namespace_changes_nothing():
    assert with_namespace(None, "topic") == with_namespace("", "topic") == "topic"
