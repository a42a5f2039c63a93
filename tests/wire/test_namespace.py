"""Namespaces and endpoints."""

from __future__ import annotations

import pytest

from rocket_sink.wire.namespace import (
    instance_id,
    name_server_address,
    namespace_of,
    with_namespace,
    without_namespace,
)

INSTANCE = "MQ_INST_XXX"
PAIRS = [
    ("TOPIC_XXX", "MQ_INST_XXX%TOPIC_XXX"),
    ("GID_XXX", "MQ_INST_XXX%GID_XXX"),
    ("%RETRY%GID_XXX", "%RETRY%MQ_INST_XXX%GID_XXX"),
    ("%DLQ%GID_XXX", "%DLQ%MQ_INST_XXX%GID_XXX"),
]


@pytest.mark.parametrize(("bare", "full"), PAIRS)
def test_c55_a_namespace_comes_and_goes(bare: str, full: str):
    assert with_namespace(INSTANCE, bare) == full
    assert with_namespace(INSTANCE, full) == full
    assert without_namespace(full) == bare
    assert without_namespace(full, INSTANCE) == bare
    assert without_namespace(full, "MQ_INST_XXX1") == full
    assert without_namespace(bare) == bare
    assert (namespace_of(full), namespace_of(bare)) == (INSTANCE, "")


@pytest.mark.parametrize("name", ["rmq_sys_topic", "TBW102", "CID_RMQ_SYS_TRANS", ""])
def test_c55_the_systems_names_have_none(name: str):
    assert with_namespace(INSTANCE, name) == name
    assert without_namespace(name) == name
    assert namespace_of(name) == ""


def test_no_namespace_changes_nothing():
    assert with_namespace(None, "topic") == with_namespace("", "topic") == "topic"


@pytest.mark.parametrize(
    ("endpoint", "address", "instance"),
    [
        ("http://127.0.0.1:9876", "127.0.0.1:9876", None),
        ("127.0.0.1:9876", "127.0.0.1:9876", None),
        (
            "http://MQ_INST_123456789_BXXUzaee.xxx:80",
            "MQ_INST_123456789_BXXUzaee.xxx:80",
            "MQ_INST_123456789_BXXUzaee",
        ),
        (
            "MQ_INST_123456789_BXXUzaee.xxx:80",
            "MQ_INST_123456789_BXXUzaee.xxx:80",
            "MQ_INST_123456789_BXXUzaee",
        ),
    ],
)
def test_c56_endpoints(endpoint: str, address: str, instance: str | None):
    assert name_server_address(endpoint) == address
    assert instance_id(endpoint) == instance
