"""rocket-sink: a Spark structured-streaming sink for Apache RocketMQ, in pure Python.

The public names are imported on first use: `import rocket_sink` itself imports no Spark or Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rocket_sink.errors import Outcome as Outcome
    from rocket_sink.errors import RocketSinkError as RocketSinkError
    from rocket_sink.ledger.driver.ledger import Ledger as Ledger
    from rocket_sink.message import Message as Message
    from rocket_sink.message import MessageQueue as MessageQueue
    from rocket_sink.message import SendResult as SendResult
    from rocket_sink.net.hooks import RpcHook as RpcHook
    from rocket_sink.options import SinkOptions as SinkOptions
    from rocket_sink.producer.admin.admin import Admin as Admin
    from rocket_sink.producer.hooks import SendHook as SendHook
    from rocket_sink.producer.producer import Producer as Producer
    from rocket_sink.producer.transactions import TransactionResult as TransactionResult
    from rocket_sink.producer.transactions import TransactionState as TransactionState
    from rocket_sink.spark.datasource import register as register
    from rocket_sink.spark.session import build_session as build_session
    from rocket_sink.spark.sink import RocketSink as RocketSink
    from rocket_sink.task.table_producer import TableProducer as TableProducer
    from rocket_sink.task.table_producer import TableResult as TableResult
    from rocket_sink.wire.acl import Credentials as Credentials

_MODULES: Final = {
    "Admin": "rocket_sink.producer.admin.admin",
    "Credentials": "rocket_sink.wire.acl",
    "Ledger": "rocket_sink.ledger.driver.ledger",
    "Message": "rocket_sink.message",
    "MessageQueue": "rocket_sink.message",
    "Outcome": "rocket_sink.errors",
    "Producer": "rocket_sink.producer.producer",
    "RocketSink": "rocket_sink.spark.sink",
    "RocketSinkError": "rocket_sink.errors",
    "RpcHook": "rocket_sink.net.hooks",
    "SendHook": "rocket_sink.producer.hooks",
    "SendResult": "rocket_sink.message",
    "SinkOptions": "rocket_sink.options",
    "TableProducer": "rocket_sink.task.table_producer",
    "TableResult": "rocket_sink.task.table_producer",
    "TransactionResult": "rocket_sink.producer.transactions",
    "TransactionState": "rocket_sink.producer.transactions",
    "build_session": "rocket_sink.spark.session",
    "register": "rocket_sink.spark.datasource",
}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        from rocket_sink.errors import MissingPackageError

        raise MissingPackageError(
            f"{name} needs the package {error.name}, which is not installed here: pip install "
            "rocket-sink installs the packages that it needs, but --no-deps or a zip file does not",
            package=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
