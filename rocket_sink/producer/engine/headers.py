"""Templates of request headers, and the credentials that sign the headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rocket_sink.net import log
from rocket_sink.option_spec import resolve_secret
from rocket_sink.options import SinkOptions
from rocket_sink.routing.topic_publish_info import TopicCache
from rocket_sink.wire.acl import Credentials, Signer
from rocket_sink.wire.requests import namespace_fields
from rocket_sink.wire.send_header import SendTemplate

_LOG: Final = log.logger(__name__)
CredentialsProvider = Callable[[], Credentials]
"""A function that returns the credentials. The client calls it when it starts, and when a broker
refuses the credentials. It runs on the thread that drives the client, while all requests wait."""


class HeaderTemplates:
    """The header templates and the signer of one engine. `producer_group` has its namespace. If it
    is empty, or `provider` is None, the options' values are used."""

    def __init__(
        self,
        options: SinkOptions,
        producer_group: str = "",
        provider: CredentialsProvider | None = None,
    ) -> None:
        self._options = options
        self._group = producer_group or options.producer_group
        self._provider = provider
        self._namespace = namespace_fields(options.namespace_v2)
        self.templates: TopicCache[tuple[str, bool, bool], SendTemplate] = TopicCache()
        """The templates made so far. Hot paths look here before they call `template`."""
        self._changed_s = self._read_s = float("-inf")
        self._credentials = self._read()
        self._replaced: Credentials | None = None
        """The previous credentials, still masked in answers to requests that they signed."""
        self.signer: Signer | None = self._credentials.signer() if self._credentials else None

    def template(self, topic: str, *, batch: bool, reply: bool = False) -> SendTemplate:
        template = self.templates.get((topic, batch, reply))
        if template is None:
            template = self.templates[topic, batch, reply] = SendTemplate(
                producer_group=self._group,
                topic=topic,
                batch=batch,
                reply=reply,
                default_topic=self._options.template_topic,
                default_topic_queue_nums=self._options.default_topic_queue_nums,
                namespace=self._options.namespace_v2,
                signer=self.signer,
            )
        return template

    @property
    def adder(self) -> Callable[[Mapping[str, str], Any], Mapping[str, str]] | None:
        """The function that returns additional header fields (namespace, signature) for a request
        without a template; None if requests need neither."""
        return self._extra_fields if self._namespace or self.signer is not None else None

    def _extra_fields(self, ext: Mapping[str, str], body: Any) -> Mapping[str, str]:
        if self.signer is None:
            return self._namespace
        return {**self._namespace, **self.signer({**ext, **self._namespace}, body)}

    def hide(self, remark: str) -> str:
        """Mask the credentials in a peer's remark."""
        for credentials in (self._credentials, self._replaced):
            if credentials is not None:
                remark = credentials.masked(remark)
        return remark

    def reread(self, signed_s: float, now_s: float) -> bool:
        """Read the credentials again; return whether they differ from those in use at `signed_s`.
        If brokers refuse many requests at once, only the first refusal reads them."""
        if self._credentials is None:
            return False
        if signed_s <= self._changed_s:
            return True
        if signed_s <= self._read_s:
            return False
        self._read_s, before = now_s, self._credentials
        try:
            fresh = self._read()
        except Exception:
            # The provider failed. The request ends with the broker's refusal, which says more.
            _LOG.exception("the credentials could not be read again")
            return False
        if fresh is None or fresh.__reduce__() == before.__reduce__():
            return False
        self._credentials, self._replaced = fresh, before
        self.signer = self._credentials.signer()
        self.templates.clear()
        self._changed_s = now_s
        return True

    def _read(self) -> Credentials | None:
        """Return the provider's credentials, else those of the options, else None. Raise
        OptionError if a variable or file that an option names is missing or empty."""
        options = self._options
        if self._provider is not None:
            return self._provider()
        if not options.access_key or not options.secret_key:
            return None
        token = options.security_token
        return Credentials(
            resolve_secret("accessKey", options.access_key).reveal(),
            resolve_secret("secretKey", options.secret_key),
            resolve_secret("securityToken", token) if token else None,
        )
