"""Request signatures (AclClientRPCHook). ACL 1.0 and 2.0 use the same signatures.

A signature (HMAC-SHA1, Base64) covers the values of all header fields in the order of their names,
without separators, and then the body. It is weak: `a="1", b="23"` has the signature of
`a="12", b="3"`, and without time and nonce a signed request can be replayed. So use TLS."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from rocket_sink.errors import OptionError
from rocket_sink.option_spec import Secret
from rocket_sink.text import masked
from rocket_sink.wire.headers import Body

SIGNATURE: Final = "Signature"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
_UNSIGNED: Final = (SIGNATURE, UNIQUE_KEY_QUERY)
"""Fields that this client does not sign. Brokers after 5.0.0 expect a signed UNIQUE_KEY_QUERY in
requests of versions above 4.9.3 (PlainAccessResource), so `requests.query_message` names 4.9.3."""

SignedBody = Body | Iterable[Body] | None


class Credentials:
    """An access key (ACL 2.0: user name) with its secret; `repr` shows neither.

    Raises:
        OptionError: one of the two is missing. Java then sends unsigned requests without a word.
    """

    __slots__ = ("_secret", "_token", "access_key")

    def __init__(
        self, access_key: str, secret_key: str | Secret, security_token: str | Secret | None = None
    ) -> None:
        self.access_key = access_key
        self._secret = Secret(secret_key)
        self._token = Secret(security_token) if security_token else None
        if not access_key or not self._secret:
            raise OptionError(
                "accessKey and secretKey belong together: one of them is empty or missing"
            )

    def __repr__(self) -> str:
        return "Credentials(access_key=***, secret_key=***)"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.access_key, self._secret, self._token)

    def fields(self) -> dict[str, str]:
        """Return the header fields of every signed request, without the signature."""
        fields = {"AccessKey": self.access_key}
        if self._token is not None:
            fields["SecurityToken"] = self._token.reveal()
        return fields

    def masked(self, text: str) -> str:
        """Mask the credentials in a peer's text. Error texts of brokers name a user who is unknown
        (ACL 2.0), or whose signature is wrong (ACL 1.0)."""
        token = (self._token.reveal(),) if self._token is not None else ()
        return masked(text, (self.access_key, self._secret.reveal(), *token))

    def signer(self) -> Signer:
        """Return a new signer; credentials keep none, because an HMAC cannot be pickled."""
        return Signer(self.fields(), self._secret)


class Signer:
    """Signs requests with one set of credentials."""

    __slots__ = ("_keyed", "fields")

    def __init__(self, fields: dict[str, str], secret: Secret) -> None:
        self.fields = fields
        self._keyed = hmac.new(secret.reveal().encode(), digestmod=hashlib.sha1)

    def __call__(self, ext: Mapping[str, str], body: SignedBody) -> dict[str, str]:
        """Return the fields to add to `ext`: AccessKey, SecurityToken if any, Signature."""
        signed = {**ext, **self.fields}
        return {**self.fields, SIGNATURE: self.signature(canonical_fields(signed), body)}

    def signature(self, content: str, body: SignedBody) -> str:
        """Return the signature over `content` (`canonical_fields`) and the body's buffers."""
        mac = self._keyed.copy()
        mac.update(content.encode())
        if body is not None:
            for part in (body,) if isinstance(body, (bytes, bytearray, memoryview)) else body:
                mac.update(part)
        return base64.b64encode(mac.digest()).decode()


def canonical_fields(ext: Mapping[str, str]) -> str:
    """Return the values of the signed header fields, joined in the order of their names. The order
    is Java's, by UTF-16 code units. Python's own order differs beyond U+FFFF."""
    names = (name for name in ext if name not in _UNSIGNED)
    return "".join([ext[name] for name in sorted(names, key=lambda name: name.encode("utf-16-be"))])
