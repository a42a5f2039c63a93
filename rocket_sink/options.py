"""The option table: names, defaults, units, ranges and help.

The data source, `RocketSink`, `Producer`, the command line, `conf/` and docs/reference/options.md
take options from this table. Names and defaults are those of Java's `DefaultMQProducer` and
`ClientConfig` (5.5.0) if they have the option. Case, underscores, dots and dashes in names do not
matter; for an unknown name the error suggests the nearest known one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from rocket_sink.errors import MessageError, OptionError
from rocket_sink.forks import lazy
from rocket_sink.message_rules import BATCH_MAX_MESSAGES, check_topic, host_and_port, with_namespace
from rocket_sink.option_spec import Kind, Option, Secret, option, option_of
from rocket_sink.tables import html_table
from rocket_sink.text import nearest

NO_TEMPLATE: Final = "createTopic is empty, as it is by default with ordering=strict"
"""The reason why no topic is created (`SinkOptions.template_topic`), for messages."""
_C, _M, _S, _R, _D, _L, _K = (
    "connection", "message", "sending", "routing", "delivery", "ledger", "spark",
)  # fmt: skip
GROUPS: Final = (_C, _M, _S, _R, _D, _L, _K)


@dataclass(frozen=True)
class SinkOptions:
    """The options, parsed and checked by `SinkOptions.parse`. Immutable; Spark can pickle them.

    Attributes are the option names in snake case, with `_ms`, `_s` or `_bytes` for the unit."""

    # fmt: off
    name_server: str = option("nameServer", Kind.TEXT, "", _C, "name servers, host:port separated by ';'; empty: those of the environment variable NAMESRV_ADDR, on the driver", aliases=("namesrvAddr", "name.srv.addr", "bootstrap"), java="namesrvAddr")
    producer_group: str = option("producerGroup", Kind.TEXT, "rocket-sink", _C, "producer group, seen by the brokers' tools", aliases=("group",), java="producerGroup")
    instance_name: str = option("instanceName", Kind.TEXT, "", _C, "distinguishes two clients of one process; generated when empty", java="instanceName")
    client_ip: str = option("clientIp", Kind.TEXT, "", _C, "address in the client id; the local one when empty", java="clientIP")
    namespace: str = option("namespace", Kind.TEXT, "", _C, "instance id put before topics and groups (namespace%topic)", java="namespace")
    namespace_v2: str = option("namespaceV2", Kind.TEXT, "", _C, "namespace that each request names in its header (fields ns and nsd), for proxies and clouds that keep namespaces apart", java="namespaceV2")
    connect_timeout_ms: int = option("connectTimeoutMs", Kind.MILLISECONDS, 3000, _C, "longest wait for a TCP or TLS connection, and for all name servers together", low=1, java="connectTimeoutMillis")
    poll_name_server_interval_ms: int = option("pollNameServerInterval", Kind.MILLISECONDS, 30_000, _C, "age at which a route is fetched again", low=10, java="pollNameServerInterval")
    heartbeat_broker_interval_ms: int = option("heartbeatBrokerInterval", Kind.MILLISECONDS, 30_000, _C, "time between heartbeats to the brokers", low=100, java="heartbeatBrokerInterval")
    address_map: tuple[tuple[str, str], ...] = option("addressMap", Kind.ADDRESSES, (), _C, "addresses of brokers as they are reached from here, where brokers register others (Docker, Kubernetes, NAT): REGISTERED=REACHED; ..., each HOST:PORT, as in 'broker-a:10911=host:30911; 10.1.0.0/16:*=gateway:*'. The registered HOST is an address, a broker's name, a network or *; a PORT may be *; the first that fits counts")
    access_key: Secret | None = option("accessKey", Kind.SECRET, None, _C, "ACL user; value, env:NAME or file:PATH")
    secret_key: Secret | None = option("secretKey", Kind.SECRET, None, _C, "ACL secret; value, env:NAME or file:PATH")
    security_token: Secret | None = option("securityToken", Kind.SECRET, None, _C, "ACL security token of temporary credentials; value, env:NAME or file:PATH")
    tls_mode: str = option("tlsMode", Kind.CHOICE, "off", _C, "TLS to name servers and brokers; useTLS=true means verify-full", choices=("off", "verify-full", "verify-ca", "insecure"), aliases=("tls.enable", "useTLS"), java="useTLS", booleans=("off", "verify-full"))
    tls_ca: str = option("tlsCa", Kind.TEXT, "", _C, "file of trusted certificates (PEM); the system's when empty")
    tls_cert: str = option("tlsCert", Kind.TEXT, "", _C, "client certificate (PEM)")
    tls_key: str = option("tlsKey", Kind.TEXT, "", _C, "client key (PEM)")
    tls_key_password: Secret | None = option("tlsKeyPassword", Kind.SECRET, None, _C, "password of the client key; value, env:NAME or file:PATH")
    tls_server_name: str = option("tlsServerName", Kind.TEXT, "", _C, "name to verify in the server's certificate instead of the address")

    topic: str = option("topic", Kind.TEXT, "", _M, "topic of all rows; wins over the topic column")
    create_topic: str = option("createTopic", Kind.TEXT, "auto", _M, "template topic whose route is used for a topic that does not exist yet, optionally with the most queues per broker, as in TBW102:8 (else 4); empty: never create; auto: TBW102, or with ordering=strict never create, because the first send makes a topic on one broker only", aliases=("createTopicKey",), java="createTopicKey")
    max_message_size_bytes: int = option("maxMessageSize", Kind.BYTES, 4_194_304, _M, "largest body, before compression", low=1, high=16_000_000, java="maxMessageSize")
    compress_over_bytes: int = option("compressMsgBodyOverHowmuch", Kind.BYTES, 4096, _M, "bodies of single messages from this size on are compressed, where that makes them smaller; those in batches by compressType=...-all only", low=0, java="compressMsgBodyOverHowmuch")
    compress_level: int = option("compressLevel", Kind.INTEGER, -1, _M, "compression level of zlib and zstd; lz4 has none. -1: 5 for zlib, as in Java's client, and 1 for zstd", low=-1, high=9, java="compressLevel")
    compress_type: str = option("compressType", Kind.CHOICE, "zlib", _M, "compression of single messages; zlib-all, lz4-all, zstd-all: Spark lanes compress the bodies inside batches too, each by itself, and bodies that do not shrink travel in requests of their own", choices=("none", "zlib", "lz4", "zstd", "zlib-all", "lz4-all", "zstd-all"), java="compressType")
    allow_system_topics: bool = option("allowSystemTopics", Kind.BOOLEAN, False, _M, "let the topic column name topics that brokers use themselves (TBW102, RMQ_SYS_..., %RETRY%..., names of brokers and clusters); else such a row is a dead letter")
    property_policy: str = option("propertyPolicy", Kind.CHOICE, "error", _M, "illegal user properties: refuse the row, or leave the property out", choices=("error", "drop"))

    send_msg_timeout_ms: int = option("sendMsgTimeout", Kind.MILLISECONDS, 3000, _S, "total time for a send with all its attempts", low=1, java="sendMsgTimeout")
    attempt_timeout_ms: int = option("sendMsgMaxTimeoutPerRequest", Kind.MILLISECONDS, -1, _S, "longest single attempt; -1: an equal share of the remaining time", low=-1, aliases=("attemptTimeoutMs",), java="sendMsgMaxTimeoutPerRequest")
    retry_times: int = option("retryTimesWhenSendFailed", Kind.INTEGER, 2, _S, "further attempts after the first", low=0, high=100, aliases=("retryTimesWhenSendAsyncFailed",), java="retryTimesWhenSendFailed")
    retry_response_codes: tuple[int, ...] = option("retryResponseCodes", Kind.INTEGERS, (17, 14, 1, 2, 16, 204, 205, 215, 29, 501, 1500), _S, "response codes after which another attempt is made", java="retryResponseCodes")
    retry_backoff_ms: int = option("retryBackoffMs", Kind.MILLISECONDS, 50, _S, "first wait after a busy answer, doubled each time, with jitter", low=1)
    retry_backoff_max_ms: int = option("retryBackoffMaxMs", Kind.MILLISECONDS, 1000, _S, "longest wait after a busy answer", low=1)
    max_in_flight: int = option("backPressureForAsyncSendNum", Kind.INTEGER, 2048, _S, "most requests in flight; sends block above", low=1, aliases=("maxInFlight",), java="backPressureForAsyncSendNum")
    max_in_flight_bytes: int = option("backPressureForAsyncSendSize", Kind.BYTES, 16_777_216, _S, "most bytes in flight; sends block above", low=1024, java="backPressureForAsyncSendSize")
    max_messages_per_second: int = option("maxMessagesPerSecond", Kind.INTEGER, 0, _S, "most messages per second over all tasks of a write, each task keeping its part (see rateTasks); 0: no limit", low=0)
    max_bytes_per_second: int = option("maxBytesPerSecond", Kind.BYTES, 0, _S, "most body bytes per second over all tasks of a write, each task keeping its part (see rateTasks); 0: no limit", low=0)
    rate_tasks: int = option("rateTasks", Kind.INTEGER, 0, _S, "tasks that run at once, among which the limits per second are divided evenly; 0: the task slots that Spark has when the write starts (format(\"rocketmq\"): when register is called); a producer of its own is one", low=0)
    auto_batch: tuple[int, int] | None = option("autoBatch", Kind.BATCH, None, _S, "gather asynchronous sends into batches: the longest time in which a message waits for its batch, and the size at which the batch is sent, as in '10ms, 32KiB', which true means; empty: do not", low=1, high=2_097_152, java="autoBatch", booleans=("", "10ms,32KiB"))
    request_max_bytes: int = option("requestMaxBytes", Kind.BYTES, 1_048_576, _S, "largest batch request of the Spark lanes", low=1024, high=4_194_304)
    request_max_messages: int = option("requestMaxMessages", Kind.INTEGER, 4000, _S, "most messages in a batch request of the Spark lanes; foreach gathers twice as many rows, or 16 MiB of bodies", low=1, high=BATCH_MAX_MESSAGES)
    trace_sample: float = option("traceSample", Kind.NUMBER, 0.0, _S, "share of the messages (Spark lanes and TableProducer: of the requests) whose traces go to the trace topic, as in 0.01; 0: none", low=0, high=1, aliases=("enableTrace",), java="enableTrace", booleans=("0", "1"))
    trace_topic: str = option("traceTopic", Kind.TEXT, "RMQ_SYS_TRACE_TOPIC", _S, "topic of message traces", java="traceTopic")

    fault_table: str = option("faultTable", Kind.FAULT_TABLE, "5.x", _R, "for how long a broker is avoided after an answer that took so long: the table of RocketMQ 5.x or 4.x, or LATENCY:DURATION, ..., as in '50:0, 550:2s, 3s:30s'; a failure counts as 10 s (4.x: 30 s). off: brokers that are slow or failing are not avoided", aliases=("sendLatencyFaultEnable", "sendLatencyEnable"), java="sendLatencyEnable", booleans=("off", "5.x"))
    suspect_after_ms: int = option("suspectAfterMs", Kind.MILLISECONDS, 250, _R, "a broker with an unanswered request this old gets no new ones while another broker can take them", low=10)
    queue_selector: str = option("queueSelector", Kind.SELECTOR, "round_robin", _R, "queue of messages without sharding key: round_robin, random, weighted (a broker weighs its number of queues over its latency), least_latency, or the brokers' weights, as in 'broker-a=2, broker-b=1' (others weigh 1)")
    machine_room: str = option("machineRoom", Kind.TEXT, "", _R, "messages without sharding key go to brokers of this room while one of them is available; a broker's room is what stands before the @ in its name")
    sharding_hash: str = option("shardingHash", Kind.CHOICE, "java", _R, "queue of messages with a sharding key. java: String.hashCode of the key's text, numbers too, as SelectMessageQueueByHash does with a String; java_long: keys that are whole numbers by Long.hashCode, as it does with a Long (or an Integer from 0 on), others as java; siphash24: as gRPC clients choose, whose single messages a proxy of a cluster places anew; rendezvous: fewest keys move when brokers come and go", choices=("java", "java_long", "siphash24", "rendezvous"))

    delivery: str = option("delivery", Kind.CHOICE, "at_least_once", _D, "effectively_once: ids that a replay repeats, and the brokers are asked before anything is sent that may be stored already; needs a ledger. transactional: half messages, which consumers see once the epoch is in the ledger (foreachBatch and sink.write); needs a ledger", choices=("at_least_once", "effectively_once", "transactional"))
    replay_check: str = option("replayCheck", Kind.CHOICE, "auto", _D, "effectively_once: rows that are looked up before they are sent: those of epochs that were begun before, all, or none", choices=("auto", "always", "never"))
    stored_check_timeout_ms: int = option("storedCheckTimeout", Kind.MILLISECONDS, 60_000, _D, "effectively_once: longest wait for a request's answer while its connection lives, and then for the brokers' word whether it is stored. transactional: longest wait for a broker that commits no half message", low=1)
    stored_check_delay_ms: int = option("storedCheckDelay", Kind.MILLISECONDS, 3000, _D, "effectively_once, transactional: a message counts as absent only after its broker has answered for this long", low=0)
    ordering: str = option("ordering", Kind.CHOICE, "none", _D, "none; best_effort: a key moves when its broker is isolated; strict: a key never moves", choices=("none", "best_effort", "strict"))
    order_wait_ms: int = option("orderWaitMs", Kind.MILLISECONDS, 60_000, _D, "strict: longest wait for a key's own queue. The tasks of an executor share the wait: once rows have waited so long for a broker, later rows wait for sendMsgTimeout, until the broker is back", low=1)
    delivery_timeout_ms: int = option("deliveryTimeoutMs", Kind.MILLISECONDS, 30_000, _D, "Spark lanes, unordered rows: total time for a request with all its attempts, in the place of sendMsgTimeout", low=1)
    on_route_change: str = option("onRouteChange", Kind.CHOICE, "fail", _D, "what to do when the topic's queues change under an ordered query. fail: strict order fails, best_effort keeps the former queues and warns; allow: use the present queues", choices=("fail", "allow"))
    on_pending_key: str = option("onPendingKey", Kind.CHOICE, "auto", _D, "later rows of a sharding key that has pending dead letters in the ledger. pass: send them; hold: hold them back as dead letters until a backfill has resolved those (needs an ordering and a ledger); auto: hold with ordering=strict and a ledger, else pass", choices=("auto", "pass", "hold"))
    on_invalid: str = option("onInvalid", Kind.CHOICE, "dead_letter", _D, "a row that no broker would take", choices=("dead_letter", "fail"))
    on_degraded: str = option("onDegraded", Kind.CHOICE, "accept", _D, "stored without the durability asked for. retry: send it again, which doubles it, but not for a slave that is missing", choices=("accept", "retry", "fail"), aliases=("retryAnotherBrokerWhenNotStoreOK",), java="retryAnotherBrokerWhenNotStoreOK", booleans=("accept", "retry"))
    max_failures: str = option("maxFailures", Kind.BUDGET, "", _D, "error budget of a task: as many rows, or such a part of them, may become dead letters, as in 100 or 1%; 0: the first one fails the task; empty: no limit. A task fails in any case if no broker of its topics took any of its rows")
    max_epoch_failures: str = option("maxEpochFailures", Kind.BUDGET, "", _D, "error budget of an epoch, or batch write, in the form of maxFailures; checked on the driver after the epoch's tasks, by all lanes but foreach, which refuses it")
    dead_letter_topic: str = option("deadLetterTopic", Kind.TEXT, "", _D, "topic that gets each dead letter too, if it has a body and the topic takes it, with properties that tell where it comes from; the ledger has it in any case")

    ledger: str = option("ledger", Kind.TEXT, "", _L, "path of the Delta ledger; without one a row that cannot be sent fails the task")
    ledger_via: str = option("ledgerVia", Kind.CHOICE, "auto", _L, "foreach and data source: how a task's ledger rows reach the driver. spool: files in the ledger's folder, where those of a failed or killed task stay on record too. spark: with the task's result (commit message, accumulator), so that tasks need no way to the ledger; what failed tasks sent is then not in it. auto: spark where the ledger is on a store that tasks cannot reach, else spool", choices=("auto", "spool", "spark"))
    fold_interval_ms: int = option("foldIntervalMs", Kind.MILLISECONDS, 10_000, _L, "shortest time between two folds of the spool into the ledger while a query runs", low=0)
    ledger_retention_ms: tuple[tuple[str, int], ...] = option("ledgerRetention", Kind.DURATIONS, (), _L, "how long rows of the ledger stay, by kind, as in 'send=7d, epoch=400d' (others stay for ever); checked once a day while a query runs. Dead letters that are pending, open transactions and the last epochs of a query stay in any case. body: how long bodies of dead letters stay that have been stored or dropped (7d, unless it is set); body=0: the ledger has digests of bodies only, so a backfill cannot send these letters. Where Spark's Delta commits to the ledger, everything stays, and a warning says so")

    columns: tuple[tuple[str, str], ...] = option("columns", Kind.COLUMNS, (), _K, "row contract columns taken from others, as in 'body=payload, keys=order_id'")
    body_format: str = option("bodyFormat", Kind.CHOICE, "column", _K, "column: the body column; json: the other columns as one JSON object, without fields that are null, as Spark's to_json writes them by default; json_nulls: with them, as null", choices=("column", "json", "json_nulls"))
    strict_columns: bool = option("strictColumns", Kind.BOOLEAN, False, _K, "refuse columns that the row contract does not know")
    order_by: str = option("orderBy", Kind.TEXT, "", _K, "column that sorts a key's rows inside a task")
    gather_max_delay_ms: int = option("gatherMaxDelayMs", Kind.MILLISECONDS, 50, _K, "foreach: longest time a row waits for others in Python where Spark hands rows out slowly; 0: until there are enough rows, or the end of the task. 50: at 1,000 rows/s it costs 1 % of a core (20: 9 %, 5: 26 %, and two to six times as many ledger rows). A delay gives rows ids of their own, for 0.7 CPU seconds per million; orderBy waits for the end of the task. What Spark keeps back before is not in it", low=0, high=30_000)
    producer_cache_timeout_ms: int = option("producerCacheTimeout", Kind.MILLISECONDS, 600_000, _K, "an idle producer of a worker is closed after this", low=0, aliases=("spark.rocketmq.producer.cache.timeout",))
    allow_speculation: bool = option("allowSpeculation", Kind.BOOLEAN, False, _K, "run although spark.speculation sends rows twice")
    app_id: str = option("appId", Kind.TEXT, "", _K, "names the query in the ledger where Spark gives no query id; in a stream it belongs to one checkpoint, and a start from another one is refused")
    batch_id: str = option("batchId", Kind.TEXT, "", _K, "names a batch write (under its appId, if there is one), so that it may be repeated: a repeated write that is complete sends nothing, one that ended half-way is sent again as an epoch is; needs a ledger")
    # fmt: on

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None = None, /, **more: Any) -> SinkOptions:
        """Parse options, whose values are text or Python values.

        Raises:
            OptionError: an unknown name, a value out of range, a repeated option, or options that
                contradict each other.
        """
        return _checked(cls(**_parsed([*(given or {}).items(), *more.items()])))

    def with_(self, /, **changes: Any) -> SinkOptions:
        """Return a copy with these values changed; None changes nothing."""
        return _checked(replace(self, **_parsed(changes.items())))

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The name servers' addresses, `host:port` each.

        Raises:
            OptionError: there is no address, or an address has another form.
        """
        addresses = tuple(part.strip() for part in self.name_server.split(";") if part.strip())
        if not addresses:
            raise OptionError(
                "option nameServer is missing: give the name servers' addresses, as in "
                "nameServer=10.0.0.1:9876;10.0.0.2:9876, or set NAMESRV_ADDR",
                option="nameServer",
            )
        for address in addresses:
            if host_and_port(address) is None:
                raise OptionError(
                    f"option nameServer: {address!r} is not an address of the form HOST:PORT, as "
                    f"127.0.0.1:9876{_suggestion(self.name_server)}",
                    option="nameServer",
                )
        return addresses

    @property
    def holds_pending_keys(self) -> bool:
        """Whether rows wait for the pending dead letters of their key."""
        is_default = self.on_pending_key == "auto" and self.ordering == "strict" and self.ledger
        return self.on_pending_key == "hold" or bool(is_default)

    @property
    def template_topic(self) -> str:
        """The topic whose route is used for a topic that does not exist; empty: none is created."""
        topic = self.create_topic.partition(":")[0]
        if topic != "auto":
            return topic
        return "" if self.ordering == "strict" else "TBW102"

    @property
    def default_topic_queue_nums(self) -> int:
        """The most queues per broker of a topic that is created."""
        return int(self.create_topic.partition(":")[2] or 4)

    @property
    def full_topic(self) -> str:
        """The option's topic with its namespace of either kind, by which notes know it."""
        return with_namespace(self.namespace or self.namespace_v2, self.topic)

    @property
    def packs_json(self) -> bool:
        """Whether a row's body is a JSON object of its columns."""
        return self.body_format != "column"

    @property
    def body_retention_ms(self) -> int:
        """How long bodies of settled dead letters stay; 0: the ledger has no bodies."""
        return dict(self.ledger_retention_ms).get(BODY, 604_800_000)

    @property
    def using_ledger_files(self) -> tuple[str, ...]:
        """The settings for which tasks write notes into the ledger's folder."""
        entries = {
            f"delivery={self.delivery}": self.delivery != "at_least_once",
            "ordering=strict": self.ordering == "strict",
            "onPendingKey=hold": self.on_pending_key == "hold",
            "appId": bool(self.app_id),
            "batchId": bool(self.batch_id),
        }
        return tuple(entry for entry, is_set in entries.items() if is_set)

    def given(self) -> dict[str, Any]:
        """Return {option name: value} of the options that differ from their defaults."""
        return {
            o.name: getattr(self, o.attribute)
            for o in OPTIONS
            if getattr(self, o.attribute) != o.default
        }

    @lazy
    def digest(self) -> str:
        """A digest of all values, with digests of credentials; the key of producer pools."""
        values = {spec.name: getattr(self, spec.attribute) for spec in OPTIONS}
        parts = [
            f"{name}={value.digest() if isinstance(value, Secret) else repr(value)}"
            for name, value in values.items()
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        assignments = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"SinkOptions({assignments})"

    def to_html(self, title: str = "SinkOptions") -> str:
        """Return an HTML table of the options that differ from their defaults, with their help."""
        options = ((find_option(name), value) for name, value in self.given().items())
        rows = [(spec.name, spec.shown(value), spec.help) for spec, value in options]
        return html_table(title, rows or [("", "all options have their defaults", "")])

    _repr_html_ = to_html


LEDGER_KINDS: Final = (
    "send", "dead_letter", "resolution", "isolation", "epoch", "backfill", "transaction",
)  # fmt: skip
"""The kinds of ledger rows (`ledger.schema.KINDS`)."""
BODY: Final = "body"
"""The name of bodies of dead letters in `ledgerRetention`."""
_APP_ID: Final = re.compile(r"[\w./:@+=,-]+( +[\w./:@+=,-]+)*")


def constructor_options(options: SinkOptions | None, changes: Mapping[str, Any]) -> SinkOptions:
    """Return `options` with `changes`, or without `options` those that `changes` names. If they have
    no name server, add that of the environment, so that tasks on other hosts get it with the other
    options. Raise OptionError as `SinkOptions.parse` does, and if `options` is another object (an
    address)."""
    if options is None:
        options = SinkOptions()
    elif not isinstance(options, SinkOptions):
        raise OptionError(
            f"a {type(options).__name__} is no SinkOptions: give options by name, as in "
            'nameServer="HOST:9876"'
        )
    options = options.with_(**changes)
    return options if options.name_server else options.with_(nameServer=environ_name_servers())


def environ_name_servers() -> str | None:
    """Return the name servers' addresses of the environment variable NAMESRV_ADDR, which Java's
    client reads, too (NameServerAddressUtils); None if it is not set or empty."""
    return os.environ.get("NAMESRV_ADDR") or None


def _checked(options: SinkOptions) -> SinkOptions:
    """Return the options; raise OptionError if they contradict each other."""
    missing = "secretKey" if options.access_key else "accessKey"
    rules = (
        *((value and not _APP_ID.fullmatch(value), name,
           (f"option {name}: {value!a} has characters other than letters, digits, spaces and "
            "._:/@+=,-; it stands in paths, in queries and in commands to paste"))
          for name, value in (("appId", options.app_id), ("batchId", options.batch_id))),
        (options.batch_id and not options.ledger, "batchId",
         ("option batchId: the ledger remembers which batch writes are complete: give the option "
          "ledger=PATH")),
        (bool(options.access_key) != bool(options.secret_key), missing,
         f"option {missing} is missing: accessKey and secretKey only work together"),
        (options.namespace and options.namespace_v2, "namespaceV2",
         ("options namespace and namespaceV2 would both put a namespace before each topic; give one "
          "of them: namespaceV2 if the servers read it from headers, else namespace")),
        (bool(options.tls_cert) != bool(options.tls_key), "tlsCert",
         "options tlsCert and tlsKey only work together"),
        (options.delivery == "effectively_once" and options.on_degraded == "retry", "delivery",
         ("onDegraded=retry sends a stored message again, which delivery=effectively_once must "
          "not")),
        (options.delivery == "transactional" and not options.ledger, "ledger",
         ("delivery=transactional decides by the ledger which messages become visible; give the "
          "option ledger=PATH")),
        (options.on_pending_key == "hold" and (options.ordering == "none" or not options.ledger),
         "onPendingKey",
         ("onPendingKey=hold keeps the order of keys whose dead letters the ledger holds: it needs "
          "ordering=strict or best_effort, and a ledger")),
        (options.ledger_via == "spark" and options.using_ledger_files, "ledgerVia",
         (f"ledgerVia=spark lets tasks do without the ledger's folder, in which "
          f"{' and '.join(options.using_ledger_files)} keeps notes; leave one of them out")),
        (any(name != BODY and not (ms and name in LEDGER_KINDS)
             for name, ms in options.ledger_retention_ms), "ledgerRetention",
         f"option ledgerRetention: rows of {', '.join(LEDGER_KINDS)} stay for more than 0"),
        (not re.fullmatch(r"[^:]*(:[1-9][0-9]{0,4})?", options.create_topic), "createTopic",
         f"option createTopic: {options.create_topic!r} is no topic and number of queues"),
        (options.dead_letter_topic
         and with_namespace(options.namespace, options.dead_letter_topic)
         == with_namespace(options.namespace, options.topic),
         "deadLetterTopic",
         "deadLetterTopic is the topic itself, which would get its own dead letters"),
    )  # fmt: skip
    for broken, name, text in rules:
        if broken:
            raise OptionError(text, option=name)
    if options.namespace:
        check_topic_option("namespace", "x", options.namespace)
    if options.dead_letter_topic:
        check_topic_option("deadLetterTopic", options.dead_letter_topic, options.namespace)
    return options


def _suggestion(name_server: str) -> str:
    """Return a suggestion for a wrong nameServer, as the end of an error; empty if there is none."""
    parts = re.split(r"[;,\s]+", re.sub(r"\w+://|/+(?=$|[;,\s])", "", name_server.strip()))
    parts = [part if host_and_port(part) else f"{part}:9876" for part in parts if part]
    return f"; did you mean {';'.join(parts)!r}?" if all(map(host_and_port, parts)) else ""


def check_topic_option(name: str, topic: str, namespace: str = "") -> None:
    """Raise OptionError if clients may not send to `topic`, the value of the option `name`."""
    try:
        check_topic(with_namespace(namespace, topic))
    except MessageError as error:
        raise OptionError(f"option {name}: {error.text}", option=name) from None


def _parsed(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return {attribute: parsed value} of (name, value) pairs; None values are left out."""
    parsed: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in values:
        spec = find_option(name)
        if spec.attribute in names:
            raise OptionError(
                f"option {spec.name} is given twice, as {names[spec.attribute]!r} and as "
                f"{name!r}; keep one",
                option=spec.name,
            )
        names[spec.attribute] = name
        if value is not None:
            parsed[spec.attribute] = spec.parse(value)
    return parsed


OPTIONS: Final[tuple[Option, ...]] = tuple(option_of(item) for item in fields(SinkOptions))
"""The table of options, in the order in which it is printed."""


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character not in "_.-")


_BY_NAME: Final[dict[str, Option]] = {
    _plain(name): spec for spec in OPTIONS for name in (spec.name, spec.attribute, *spec.aliases)
}


_INSTEAD: Final = {
    _plain(name): hint
    for names, hint in (
        ("vipChannelEnabled clientChannelMaxIdleTimeSeconds", "leave it out: nothing needs it here"),
        ("startDetectorEnable detectTimeout detectInterval", "leave it out: probes need no setting"),
        ("serializeType", "leave it out: headers are JSON"),
        ("mqClientApiTimeout", "connectTimeoutMs is the wait for name servers, too"),
        ("latencyMax notAvailableDuration", "write faultTable=LATENCY:DURATION, ..."),
        ("batchMaxDelayMs batchMaxBytes linger.ms", "write autoBatch=DELAY, SIZE"),
        ("defaultTopicQueueNums", "write createTopic=TBW102:NUMBER"),
    )
    for name in names.split()
}  # fmt: skip
"""{plain name of an option of Java or Kafka: what to do instead}"""


def find_option(name: str) -> Option:
    """Return the option of a name, with or without `rocketmq.`; raise OptionError if unknown."""
    plain = _plain(name.removeprefix("rocketmq."))
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    near = nearest(plain, _BY_NAME)
    hint = f"did you mean {_BY_NAME[near].name!r}?" if near else "rocket-sink options lists all"
    hint = _INSTEAD.get(plain, hint)
    raise OptionError(f"unknown option {name!r}; {hint}", option=name)


def options_in(groups: Iterable[str]) -> tuple[Option, ...]:
    """Return the options of some groups, for `--help` and tables."""
    wanted = set(groups)
    return tuple(spec for spec in OPTIONS if spec.group in wanted)
