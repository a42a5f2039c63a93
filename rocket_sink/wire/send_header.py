"""Templates for the heads (lengths and header) of send requests: the hot path of single messages.

A template belongs to one producer group and topic. It writes the bytes of
`encode_head(send_message_v2(...))`, except that credentials come before the other fields."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from json.encoder import encode_basestring
from typing import Final

from rocket_sink.wire.acl import SIGNATURE, SignedBody, Signer
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.frame import check_lengths, encode_head
from rocket_sink.wire.headers import PREFIX, Frame, cut_json_header, utf8_bytes
from rocket_sink.wire.requests import AUTO_CREATE_TOPIC, namespace_fields, send_message_v2

_SMALL: Final = 8 * 1024 * 1024
"""Size of a frame in bytes up to which its lengths need no check. The limit is 16 MiB."""
_HOLES: Final = ("e", "f", "g", "h", "i", "n")
"""Fields that differ between requests of a template, in the header's order: queue id, system flag,
birth time, flag, properties, broker name (SendMessageRequestHeaderV2)."""

_quoted: Final = lru_cache(maxsize=4096)(encode_basestring)


class SendTemplate:
    """A writer of the heads of SEND_MESSAGE_V2, SEND_BATCH_MESSAGE or SEND_REPLY_MESSAGE_V2."""

    def __init__(
        self,
        *,
        producer_group: str,
        topic: str,
        batch: bool = False,
        reply: bool = False,
        default_topic: str = AUTO_CREATE_TOPIC,
        default_topic_queue_nums: int = 4,
        namespace: str = "",
        signer: Signer | None = None,
    ) -> None:
        self._message = partial(
            send_message_v2,
            producer_group=producer_group,
            topic=topic,
            batch=batch,
            default_topic=default_topic,
            default_topic_queue_nums=default_topic_queue_nums,
        )
        self._namespace = namespace_fields(namespace)
        self._reply = reply
        self._signer = signer
        added = signer.fields if signer is not None else {}
        model = self.frame(0, 0, "-", "-")
        shared = model.ext = {**added, **(model.ext or {})}
        signed = [*added, *"abcd"], "jkm", self._namespace
        self._signed_start, self._signed_end, self._signed_last = (
            "".join([shared.get(name, "") for name in names]) for names in signed
        )
        (
            self._start, self._before_sys_flag, self._before_born, self._before_flag, before,
            after, middle, self._end,
        ) = cut_json_header(model, _HOLES)  # fmt: skip
        # Cut off the properties' key: `head` leaves it out if there are no properties. Cut off the
        # quotes of properties and broker name: `encode_basestring` adds them.
        self._before_properties = before.removesuffix(',"i":"')
        self._before_broker, self._middle = after[1:-1], middle[1:]

    @property
    def takes_columns(self) -> bool:
        """Whether `fill_frames` may write the heads of many messages: they have no signatures."""
        return self._signer is None

    def head(
        self,
        opaque: int,
        queue_id: int,
        born_ms: int,
        properties: str,
        body_length: int,
        broker_name: str,
        sys_flag: int = 0,
        flag: int = 0,
        body: SignedBody = None,
    ) -> bytes:
        """Return the bytes of a request before its body. Only a signature needs `body`. Raise
        LocalProtocolError if the frame is too long, or the properties are not valid Unicode."""
        quoted = f',"i":{encode_basestring(properties)}' if properties else ""
        signature = ""
        if self._signer is not None:
            content = (
                f"{self._signed_start}{queue_id}{sys_flag}{born_ms}{flag}{properties}"
                f"{self._signed_end}{broker_name}{self._signed_last}"
            )
            signature = f',"{SIGNATURE}":"{self._signer.signature(content, body)}"'
        text = (
            f"{self._start}{queue_id}{self._before_sys_flag}{sys_flag}{self._before_born}{born_ms}"
            f"{self._before_flag}{flag}{self._before_properties}{quoted}{self._before_broker}"
            f"{_quoted(broker_name)}{signature}{self._middle}{opaque}{self._end}"
        )
        header = _utf8(text)
        return _prefix(len(header), body_length) + header

    def frames(
        self,
        messages: Iterable[tuple[bytes, str, int, int]],
        *,
        first_opaque: int,
        queue_id: int,
        born_ms: int,
        broker_name: str,
    ) -> bytes:
        """Return whole frames, one after the other, with consecutive opaque ids; errors are those
        of `head`. `messages` has (body, properties, system flag, flag) of each message."""
        pieces: list[bytes] = []
        if not self.takes_columns:
            for opaque, (body, properties, sys_flag, flag) in enumerate(messages, first_opaque):
                head = self.head(
                    opaque, queue_id, born_ms, properties, len(body), broker_name, sys_flag, flag,
                    body,
                )  # fmt: skip
                pieces += (head, body)
            return b"".join(pieces)
        # Repeat the steps of `head`, because calling it for each message takes twice the time.
        start = f"{self._start}{queue_id}{self._before_sys_flag}"
        before_flag = f"{self._before_born}{born_ms}{self._before_flag}"
        before_text = f'{self._before_properties},"i":'
        after_text, end = f"{self._before_broker}{_quoted(broker_name)}{self._middle}", self._end
        for opaque, (body, properties, sys_flag, flag) in enumerate(messages, first_opaque):
            header = _utf8(
                f"{start}{sys_flag}{before_flag}{flag}{before_text}"
                f"{encode_basestring(properties)}{after_text}{opaque}{end}"
            )
            pieces += (_prefix(len(header), len(body)), header, body)
        return b"".join(pieces)

    def frame(
        self,
        queue_id: int,
        born_ms: int,
        properties: str,
        broker_name: str,
        sys_flag: int = 0,
        flag: int = 0,
    ) -> Frame:
        """Return the request without signature, opaque id and body; the caller may change it."""
        frame = self._message(
            queue_id=queue_id,
            born_ms=born_ms,
            properties=properties,
            broker_name=broker_name,
            sys_flag=sys_flag,
            flag=flag,
        )
        if self._reply:
            frame.code = RequestCode.SEND_REPLY_MESSAGE_V2
        frame.ext = {**(frame.ext or {}), **self._namespace}
        return frame

    def head_of(self, frame: Frame, opaque: int, body_length: int, body: SignedBody) -> bytes:
        """Return the head of a frame made by `frame`, which hooks may have changed."""
        ext = dict(frame.ext or {})
        if self._signer is not None:
            ext.update(self._signer(ext, body))
        signed = Frame(frame.code, ext, opaque=opaque, flag=frame.flag)
        return encode_head(signed, body_length)


def _prefix(length: int, body_length: int) -> bytes:
    if length + body_length > _SMALL or length > 0xFFFFF:
        check_lengths(length, body_length)
    return PREFIX.pack(4 + length + body_length, length)


def _utf8(header: str) -> bytes:
    try:
        return header.encode()
    except UnicodeEncodeError:
        return utf8_bytes(header, "the properties hold text that")  # raises the error
