"""Ledgers made without Spark, and the ledger of a night in which a broker died and stayed away."""

import dataclasses
import datetime as dt
from pathlib import Path
from random import Random

import pyarrow as pa

from rocket_sink.errors import Outcome
from rocket_sink.ledger.append.delta_rs import commit, create_table, open_table
from rocket_sink.ledger.append.table import PROPERTIES
from rocket_sink.ledger.path import LOG_FOLDER, resolve_path
from rocket_sink.ledger.records import in_order, isolation_rows, replaced, send_rows
from rocket_sink.ledger.schema import LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.routing.fault import Isolation

from .values import accounts, attempt, confirmed, context, failure, letter, resolved

QUERY = "5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b"
START = dt.datetime(2026, 3, 1, 13, 45, tzinfo=dt.timezone.utc)
KILLED = START + dt.timedelta(minutes=30)
EPOCH_S = 10
EPOCHS = 360


def store(folder, batches):
    """Append these rows to a ledger as a fold does, and make its table first if there is none."""
    place = resolve_path(folder)
    version = {VERSION_PROPERTY: str(SCHEMA_VERSION)}
    if not Path(folder, LOG_FOLDER).exists():
        create_table(place, LEDGER_SCHEMA, {**PROPERTIES, **version})
    table = open_table(place)
    commit(place, table, write_data_files(place, batches), "", 0)
    return str(folder)


def at(batch, moment):
    """Return the rows with another time."""
    times = pa.array([moment] * batch.num_rows, LEDGER_SCHEMA.field("at").type)
    return replaced(batch, {"at": times})


def at_second(batch, second):
    """Return the rows with the time of a second of the night."""
    return at(batch, START + dt.timedelta(seconds=second))


def night(folder):
    """Make the ledger of a night: three brokers, two topics, and an epoch each 10 s for an hour.

    After half an hour broker-b is killed, leaves the route and does not come back: 300 rows of 6
    keys wait for it. Brokers refuse 4 rows, and 2 of them are dropped. broker-c has slow minutes.
    """
    rng = Random(7)
    rows = []
    waiting = 0
    for epoch in range(EPOCHS):
        begin = START + dt.timedelta(seconds=EPOCH_S * epoch)
        ctx = context(
            query_id=QUERY, epoch=epoch, task_attempt_id=1000 + epoch, worker="worker-1:4711"
        )
        sent, acked, dead, unknown = [], 0, 0, 0
        for n in range(12):
            name = f"broker-{'abc'[n % 3]}"
            start = begin + dt.timedelta(milliseconds=400 * n)
            slow = name == "broker-c" and 60 <= epoch < 90
            rtt = rng.lognormvariate(5.4 if slow else 1.6, 0.5)
            started = int(start.timestamp() * 1000)
            common = {
                "broker_name": name, "topic": "orders" if n % 4 else "invoices",
                "queue_id": n // 3, "started_ms": started, "message_count": 40 + n,
                "body_bytes": 400 * (40 + n), "message_id": f"0A0000{epoch:06X}{n:02X}",
                "broker_address": f"10.0.0.{1 + n % 3}:10911", "queue_wait_ms": rng.random() * 4,
                "connect_ms": 1.5 if epoch == 0 else 0.0,
            }  # fmt: skip
            if name == "broker-b" and begin >= KILLED:
                if epoch == 180:
                    sent.append(failure("CONNECTION_LOST", **common, outcome=Outcome.UNKNOWN,
                        rtt_ms=14.0, remark="10.0.0.2:10911 closed the connection"))  # fmt: skip
                elif epoch < 184:
                    sent.append(failure("CONNECT", **common, rtt_ms=2.0, attempt=2,
                        remark="cannot connect to 10.0.0.2:10911: ECONNREFUSED"))  # fmt: skip
                elif epoch < 190:
                    common |= {"wire_bytes": 0, "queue_wait_ms": 60_000.0}
                    sent.append(failure("INVALID_QUEUE", **common, rtt_ms=0.0, attempt=44,
                        remark="42 attempts from 3 on: its queue is not in the route"))  # fmt: skip
                continue
            sent.append(attempt(**common, rtt_ms=rtt))
            acked += 40 + n
        end = begin + dt.timedelta(seconds=6)
        if 180 <= epoch < 230:
            for n in range(6):
                key, first = f"customer-{n}", waiting < 6
                lost = letter(
                    ctx, sharding_key=pa.array([key]), topic="orders",
                    keys=pa.array([[f"order-{waiting}"]]),
                    last_broker_name="broker-b" if first else None,
                    reason="unknown" if first else "held_back",
                    last_error_code="CONNECTION_LOST" if first else "HELD_BACK",
                    last_error="10.0.0.2:10911 closed the connection"
                    if first
                    else "held back: an earlier message of its key was given up",
                )  # fmt: skip
                waiting += 1
                unknown, dead = unknown + first, dead + (not first)
                rows.append(at(lost, end))
        if epoch in (20, 21, 22, 23):
            refused = letter(ctx, reason="data", last_error_code="NULL_BODY", topic="invoices",
                             last_error="the row has no body")  # fmt: skip
            rows.append(at(refused, end))
            dead += 1
            if epoch < 22:
                done = resolved(refused, "dropped")
                rows.append(at(done, end + dt.timedelta(minutes=20)))
        rows.append(send_rows(sent, ctx, requests=list(range(1, len(sent) + 1))))
        rows.append(at(accounts(ctx, acked=acked, dead=dead, unknown=unknown), end))
        rows.append(at(confirmed(ctx, acked + dead + unknown), end + dt.timedelta(seconds=1)))
    events = [(KILLED, "broker-b", "CONNECTION_LOST", 40.0, 10.0, False)]
    events += [(KILLED + dt.timedelta(seconds=11 * n), "broker-b", "CONNECT", 2.0, 10.0, False)
               for n in range(1, 4)]  # fmt: skip
    slow = [START + dt.timedelta(seconds=610 + 40 * n) for n in range(7)]
    events += [(when, "broker-c", "LATENCY", 560.0, 20.0, True) for when in slow]
    for when, name, cause, latency, length, reachable in events:
        event = Isolation(name, cause, latency, 0.0, length, reachable=reachable)
        ctx = dataclasses.replace(context(query_id=QUERY), epoch=1)
        micros = int(when.timestamp() * 1e6)
        rows.append(isolation_rows([event], ctx, now_s=0.0, now_us=micros))
    return store(folder, in_order(rows, 1 << 32))
