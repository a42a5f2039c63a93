"""Request heads from templates, one template per topic and kind, signed where credentials are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.credentials import CredentialsProvider, credentials_of
from rocket_sink.wire.acl import Credentials, Signer
from rocket_sink.wire.frame import Serialize
from rocket_sink.wire.send_template import SendTemplate

_LOG: Final = log.logger(__name__)


class Heads:
    """Templates and the signer; `reread` takes credentials that were changed.

    Args:
        producer_group: as brokers know it, with its namespace.
        provider: gives the credentials; None: the options do.
    """

    def __init__(
        self,
        options: SinkOptions,
        producer_group: str = "",
        provider: CredentialsProvider | None = None,
    ) -> None:
        self._options = options
        self._group = producer_group or options.producer_group
        self._provider = provider
        self._templates: dict[tuple[str, bool, bool], SendTemplate] = {}
        self._changed_s = float("-inf")
        self._credentials = self._read()
        self.signer: Signer | None = self._credentials.signer() if self._credentials else None

    def template(self, topic: str, *, batch: bool, reply: bool = False) -> SendTemplate:
        found = self._templates.get((topic, batch, reply))
        if found is None:
            serialize: Serialize = "rocketmq" if self._options.serializer == "rocketmq" else "json"
            found = self._templates[topic, batch, reply] = SendTemplate(
                producer_group=self._group,
                topic=topic,
                batch=batch,
                reply=reply,
                default_topic=self._options.create_topic_key,
                default_topic_queue_nums=self._options.default_topic_queue_nums,
                serialize=serialize,
                signer=self.signer,
            )
        return found

    def sign(self, ext: Mapping[str, str], body: Any) -> Mapping[str, str]:
        """The fields that sign any other request; none without credentials."""
        return self.signer(ext, body) if self.signer is not None else {}

    def reread(self, signed_s: float, now_s: float) -> bool:
        """Read the credentials again; True when others are there than those of `signed_s`.

        Of many requests that are refused together the first one's reading is for all.
        """
        if self._credentials is None:
            return False
        if signed_s <= self._changed_s:
            return True
        before = self._credentials.__reduce__()[1]
        try:
            self._credentials = self._read()
        except Exception:
            # A user's code: the refusal that brought us here is the error to tell.
            _LOG.exception("the credentials could not be read again")
            return False
        if self._credentials is None or self._credentials.__reduce__()[1] == before:
            return False
        self.signer = self._credentials.signer()
        self._templates.clear()
        self._changed_s = now_s
        return True

    def _read(self) -> Credentials | None:
        return credentials_of(self._options) if self._provider is None else self._provider()
