"""Frame heads of similar sends, made from precomputed parts: the hot path of single messages.

There is one template per producer group and topic. Its heads are those of
`encode_head(send_message_v2(...))` with another order of fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Final, NamedTuple

from rocket_sink.errors import LocalProtocolError
from rocket_sink.wire.acl import SIGNATURE, SignedBody, Signer
from rocket_sink.wire.codes import CURRENT_VERSION, LanguageCode, RequestCode
from rocket_sink.wire.frame import Frame, Serialize, encode_head, frame_head
from rocket_sink.wire.requests import AUTO_CREATE_TOPIC, fields, send_message_v2

_PREFIX: Final = struct.Struct(">II")
_SMALL: Final = 8 * 1024 * 1024
"""Far below the frame limit: up to this size no check is needed."""


class HeaderParts(NamedTuple):
    """The parts of a queue's headers that its messages share, around those that differ:

    start SYS_FLAG before_flag FLAG before_properties PROPERTIES before_opaque OPAQUE end
    """

    start: bytes
    before_flag: bytes
    before_properties: bytes
    before_opaque: bytes
    end: bytes


class SendTemplate:
    """Heads of SEND_MESSAGE_V2, SEND_BATCH_MESSAGE or SEND_REPLY_MESSAGE_V2."""

    def __init__(
        self,
        *,
        producer_group: str,
        topic: str,
        batch: bool = False,
        reply: bool = False,
        default_topic: str = AUTO_CREATE_TOPIC,
        default_topic_queue_nums: int = 4,
        unit_mode: bool = False,
        serialize: Serialize = "json",
        signer: Signer | None = None,
    ) -> None:
        self._fixed: dict[str, str | int] = {
            "producer_group": producer_group,
            "topic": topic,
            "batch": batch,
            "default_topic": default_topic,
            "default_topic_queue_nums": default_topic_queue_nums,
            "unit_mode": unit_mode,
        }
        self._code = _code(batch=batch, reply=reply)
        self._serialize: Serialize = serialize
        self._signer = signer
        self._brokers: dict[str, str] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Make the parts that all heads share."""
        fixed, added = self._fixed, self._signer.fields if self._signer is not None else {}
        # Under the names of SendMessageRequestHeaderV2.
        shared = fields(
            {
                "a": fixed["producer_group"],
                "b": fixed["topic"],
                "c": fixed["default_topic"],
                "d": fixed["default_topic_queue_nums"],
                "j": 0,
                "k": fixed["unit_mode"],
                "m": fixed["batch"],
            }
        )
        self._signed_start = "".join([*added.values(), *(shared.get(name, "") for name in "abcd")])
        self._signed_end = "".join([shared.get(name, "") for name in "jkm"])
        pairs = ",".join(_pair(name, value) for name, value in {**shared, **added}.items())
        self._start = f'{{"code":{int(self._code)},"extFields":{{{pairs},"e":"'
        self._middle = f'}},"flag":0,"language":"{LanguageCode.PYTHON.name}","opaque":'
        self._end = f',"serializeTypeCurrentRPC":"JSON","version":{CURRENT_VERSION}}}'

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
        """The bytes before the body.

        `body` is needed for the signature only, when the template has a signer.

        Raises:
            LocalProtocolError: too long a frame, or properties that are not valid Unicode.
        """
        if self._serialize != "json":
            frame = self.frame(queue_id, born_ms, properties, broker_name, sys_flag, flag)
            return self.head_of(frame, opaque, body_length, body)
        broker = self._brokers.get(broker_name) or self._broker(broker_name)
        quoted = f',"i":{encode_basestring(properties)}' if properties else ""
        signature = ""
        if self._signer is not None:
            content = (
                f"{self._signed_start}{queue_id}{sys_flag}{born_ms}{flag}{properties}"
                f"{self._signed_end}{broker_name}"
            )
            signature = f',"{SIGNATURE}":"{self._signer.signature(content, body)}"'
        text = (
            f'{self._start}{queue_id}","f":"{sys_flag}","g":"{born_ms}","h":"{flag}"{broker}'
            f"{quoted}{signature}{self._middle}{opaque}{self._end}"
        )
        header = _utf8(text)
        length = len(header)
        if length + body_length > _SMALL or length > 0xFFFFF:
            return frame_head(header, body_length)
        return _PREFIX.pack(4 + length + body_length, length) + header

    def frames(
        self,
        messages: Iterable[tuple[bytes, str, int, int]],
        *,
        first_opaque: int,
        queue_id: int,
        born_ms: int,
        broker_name: str,
    ) -> bytes:
        """Whole frames, one after the other, with consecutive opaque ids.

        Args:
            messages: of each its body, properties, system flag and flag.

        Raises:
            LocalProtocolError: as `head`.
        """
        pieces: list[bytes] = []
        parts = self.parts(queue_id, born_ms, broker_name)
        if parts is None:
            for opaque, (body, properties, sys_flag, flag) in enumerate(messages, first_opaque):
                head = self.head(
                    opaque, queue_id, born_ms, properties, len(body), broker_name, sys_flag, flag,
                    body,
                )  # fmt: skip
                pieces += (head, body)
            return b"".join(pieces)
        start, before_flag, before_text, after_text, end = (part.decode() for part in parts)
        before_text, after_text = before_text[:-1], after_text[1:]  # the text brings its quotes
        pack = _PREFIX.pack
        for opaque, (body, properties, sys_flag, flag) in enumerate(messages, first_opaque):
            header = _utf8(
                f"{start}{sys_flag}{before_flag}{flag}{before_text}"
                f"{encode_basestring(properties)}{after_text}{opaque}{end}"
            )
            length, body_length = len(header), len(body)
            if length + body_length > _SMALL or length > 0xFFFFF:
                self.check_lengths(length, length + body_length)
            pieces += (pack(4 + length + body_length, length), header, body)
        return b"".join(pieces)

    def parts(self, queue_id: int, born_ms: int, broker_name: str) -> HeaderParts | None:
        """The pieces of `head` in JSON; None where each head must be made by itself."""
        if self._serialize != "json" or self._signer is not None:
            return None
        broker = self._brokers.get(broker_name) or self._broker(broker_name)
        return HeaderParts(
            f'{self._start}{queue_id}","f":"'.encode(),
            f'","g":"{born_ms}","h":"'.encode(),
            f'"{broker},"i":"'.encode(),
            f'"{self._middle}'.encode(),
            self._end.encode(),
        )

    @staticmethod
    def check_lengths(header_bytes: int, frame_bytes: int) -> None:
        """Raises LocalProtocolError when such a header or frame is too long."""
        if frame_bytes > _SMALL or header_bytes > 0xFFFFF:
            frame_head(b" " * header_bytes, frame_bytes - header_bytes)

    def _broker(self, broker_name: str) -> str:
        # The route's limit on brokers bounds this cache.
        self._brokers[broker_name] = text = f',"n":{encode_basestring(broker_name)}'
        return text

    def frame(
        self,
        queue_id: int,
        born_ms: int,
        properties: str,
        broker_name: str,
        sys_flag: int = 0,
        flag: int = 0,
    ) -> Frame:
        """Return the request as a frame that may be changed: unsigned, without opaque and body."""
        frame = send_message_v2(
            queue_id=queue_id,
            born_ms=born_ms,
            properties=properties,
            broker_name=broker_name,
            sys_flag=sys_flag,
            flag=flag,
            **self._fixed,  # type: ignore[arg-type]
        )
        frame.code = self._code
        return frame

    def head_of(self, frame: Frame, opaque: int, body_length: int, body: SignedBody) -> bytes:
        """The head of a changed `frame`."""
        ext = dict(frame.ext or {})
        if self._signer is not None:
            ext.update(self._signer(ext, body))
        signed = Frame(self._code, ext, opaque=opaque)
        return encode_head(signed, body_length, serialize=self._serialize)


def _utf8(header: str) -> bytes:
    try:
        return header.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(
            f"the properties hold text that is not valid Unicode: {error.reason}"
        ) from None


def _code(*, batch: bool, reply: bool) -> RequestCode:
    if reply:
        return RequestCode.SEND_REPLY_MESSAGE_V2
    return RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2


def _pair(name: str, value: str) -> str:
    return f"{encode_basestring(name)}:{encode_basestring(value)}"
