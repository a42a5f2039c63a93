"""For tests of jobs that send: a scripted cluster without Java, and a TCP proxy with faults.

`FakeCluster` speaks the remoting protocol on loopback ports of this process; its brokers delay,
refuse, drop, cut, freeze and lie as told, and keep what was stored for assertions. `FaultProxy`
stands before a real broker and does the same to its bytes, `FaultProxies` before all of a cluster.
"""

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
