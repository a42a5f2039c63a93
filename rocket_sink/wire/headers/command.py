"""Commands of the remoting protocol (RemotingCommand.java), and the limits on received ones.

A command is a request (flag bit 0 clear) or a response (bit 0 set); bit 1 marks a oneway request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rocket_sink.wire.codes import CURRENT_VERSION, LanguageCode

RESPONSE_FLAG: Final = 0x1
ONEWAY_FLAG: Final = 0x2

Serialize = Literal["json", "rocketmq"]
"""How a header is written: SerializeType.JSON or SerializeType.ROCKETMQ."""

Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Limits:
    """Limits on received data, which bound the memory and time that one frame can cost.

    Exceeding one is a RemoteProtocolError.
    """

    frame_bytes: int = 16 * 1024 * 1024
    """Whole frame with its length field (Java: com.rocketmq.remoting.frameMaxLength)."""
    header_bytes: int = 1024 * 1024
    ext_entries: int = 4096
    json_depth: int = 64
    remark_chars: int = 2048
    """A longer remark is cut, not refused."""
    body_bytes: int = 8 * 1024 * 1024
    """One stored message's body after inflation."""
    answer_bytes: int = 64 * 1024 * 1024
    """Memory for the decoded messages of one answer that is read whole (a look-up)."""
    poll_bytes: int = 16 * 1024 * 1024
    """Memory for the decoded messages of one pull; the others are pulled again."""
    route_bytes: int = 1024 * 1024
    route_queues: int = 65_536
    route_brokers: int = 4096


DEFAULT_LIMITS: Final = Limits()


@dataclass(slots=True)
class Frame:
    """One command; `ext` holds its header fields as text.

    Not frozen, which would triple the cost of making one; still, only its creator changes it.
    `body` is None when there is none, never empty. `language` and `code` may be unknown numbers.
    `serialize` is the form of a received header, to be used for the response.
    """

    code: int
    ext: Mapping[str, str] | None = None
    body: Body | None = None
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    version: int = CURRENT_VERSION
    language: int = LanguageCode.PYTHON
    serialize: Serialize = "json"

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)


def response_to(
    request: Frame,
    code: int,
    *,
    remark: str | None = None,
    ext: Mapping[str, str] | None = None,
    body: Body | None = None,
) -> Frame:
    """The response to a peer's request, with its opaque and serialisation."""
    return Frame(
        code, ext, body, request.opaque, RESPONSE_FLAG, remark, serialize=request.serialize
    )
