"""The words by which people search for a page, if the page itself says it otherwise. conf.py adds
them to the site's index, which its search looks into, so the pages stay as they are."""

from __future__ import annotations

from typing import Any, Final

WORDS: Final = {
    "guarantees/effectively-once": ("exactly once", "deduplicate", "idempotent"),
    "guarantees/at-least-once": ("duplicates", "twice", "lost rows"),
    "guarantees/order": ("ordering", "fifo", "sequence of messages"),
    "guarantees/brokers": ("slow broker", "failover", "circuit breaker"),
    "guarantees/transactional": ("two phase commit", "half message"),
    "reference/columns": ("late", "delay", "schedule", "schema of rows"),
    "reference/options": ("settings", "configuration", "parameters"),
    "reference/errors": ("error codes", "exception"),
    "deploy/acl": ("password", "user", "credentials", "login"),
    "deploy/tls": ("certificate", "ssl", "encryption"),
    "deploy/install": ("pip", "requirements"),
    "deploy/uninstall": ("remove", "clean up", "delete everything"),
    "deploy/proxy": ("grpc",),
    "operate/personal-data": ("customer erase", "gdpr", "right to be forgotten"),
    "operate/paged-at-night": ("troubleshooting", "runbook", "outage"),
    "operate/backfill": ("resend", "replay", "send again"),
    "operate/verify": ("prove", "count messages", "compare"),
    "operate/metrics": ("prometheus", "grafana", "opentelemetry", "monitoring"),
    "operate/alerts": ("alarm", "pager"),
    "operate/tune": ("performance", "slow"),
    "operate/ledger": ("audit", "bookkeeping"),
    "guides/dead-letters": ("dlq", "failed rows"),
    "guides/foreach": ("structured streaming", "notebook"),
    "guides/reading": ("consume", "read messages"),
    "guides/testing": ("unit test", "mock"),
    "coming-from/kafka": ("migrate", "kafka sink"),
}
"""{page: words}"""


def add_words(_: Any, page: str, source: list[str]) -> None:
    """Append a page's words to its text as index entries (the event `source-read` of Sphinx)."""
    if page in WORDS:
        source[0] += "".join(f"\n\n```{{index}} single: {word}\n```\n" for word in WORDS[page])
