"""Tools for tests of jobs that send: a scripted cluster without Java, a TCP proxy with faults.

`FakeCluster` serves the remoting protocol on loopback ports of this process. Its brokers delay,
refuse, drop and cut answers, freeze or answer wrongly as scripted, and keep stored messages for
assertions. `FaultProxy` does this before a real broker, `FaultProxies` before a cluster."""

from rocket_sink.testing.broker import FakeBroker, TopicConfig
from rocket_sink.testing.cluster import FakeCluster
from rocket_sink.testing.proxy import FaultProxies, FaultProxy
from rocket_sink.testing.script import (
    Answer,
    Behaviour,
    CloseConnection,
    CutAnswer,
    Delay,
    Drip,
    Drop,
    Garbage,
    IncompleteAnswer,
    Twice,
    WrongOpaque,
)

__all__ = [
    "Answer",
    "Behaviour",
    "CloseConnection",
    "CutAnswer",
    "Delay",
    "Drip",
    "Drop",
    "FakeBroker",
    "FakeCluster",
    "FaultProxies",
    "FaultProxy",
    "Garbage",
    "IncompleteAnswer",
    "TopicConfig",
    "Twice",
    "WrongOpaque",
]
