"""Message authentication: tags that prove the origin and the position of a frame in its
connection. No I/O; docs/wire.md.

Once both ends of a connection share a key, a tag of 16 bytes follows each frame: a keyed BLAKE2b of
the frame's number in its direction and of all its bytes. So the receiver detects, by a frame's tag
or by that of the next one, a frame that an attacker on the way has forged, changed, replayed,
dropped, reordered, or copied from another connection or from the other direction. If both ends
agreed on it, the raw bytes after a frame have a tag as well: AES-256-GMAC, for which processors
have instructions (20 GB/s on a core, against 1.0 with BLAKE2b; for 60 bytes it takes longer). That
requires the package `cryptography`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from ..errors import SealError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

# A forger needs 2**127 guesses on average, and each wrong one ends a connection.
TAG_BYTES = 16
KEY_BYTES = 32
_number_of = struct.Struct("<Q").pack
# Up to so many bytes are joined and tagged in one call: an incremental tag takes 35 us longer.
_JOINED_BYTES_MAX = 256 << 10
_NONCE_BYTES = 12


def can_tag_bytes() -> bool:
    """Whether this process can tag raw bytes: `cryptography` is installed."""
    return find_spec("cryptography") is not None


class Seal:
    """Makes the tags of one direction of one connection, in order. Not thread-safe."""

    __slots__ = ("_key", "_keyed", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._number = 0

    def tag(self, frame: bytes | bytearray | memoryview, body: bytes | memoryview = b"") -> bytes:
        """The tag of the next frame, whose bytes may come in two parts."""
        digest = self._keyed.copy()
        digest.update(_number_of(self._number) + frame)  # two updates take longer
        if body:
            digest.update(body)
        self._number += 1
        return digest.digest()

    def check(
        self,
        tag: bytes | memoryview,
        frame: bytes | bytearray | memoryview,
        body: bytes | memoryview = b"",
    ) -> None:
        """Raise SealError unless `tag` is the tag of the next frame."""
        if not hmac.compare_digest(self.tag(frame, body), tag):
            raise SealError(_FORGED)

    def of_bytes(self) -> BytesTag:
        """An object that makes the tag of the raw bytes that come next."""
        began = BytesTag(self._key, self._number)
        self._number += 1
        return began


class BytesTag:
    """The tag of raw bytes, computed incrementally. The nonce is the sequence number: unique per
    key."""

    __slots__ = ("_context", "_joined", "_key", "_nonce")

    def __init__(self, key: bytes, number: int) -> None:
        self._key = hashlib.blake2b(b"bytes", key=key, digest_size=KEY_BYTES).digest()
        self._nonce = number.to_bytes(_NONCE_BYTES, "little")
        self._joined = bytearray()
        self._context: AEADEncryptionContext | None = None

    def update(self, views: Iterable[memoryview]) -> None:
        """Add the bytes that come next."""
        for view in views:
            if self._context is None:
                if len(self._joined) + len(view) <= _JOINED_BYTES_MAX:
                    self._joined += view
                    continue
                self._context = self._begun()
            self._context.authenticate_additional_data(view)

    def tag(self) -> bytes:
        """The tag of all bytes added."""
        if self._context is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            alone: bytes = AESGCM(self._key).encrypt(self._nonce, b"", self._joined)
            return alone
        self._context.finalize()
        tag: bytes = self._context.tag
        return tag

    def _begun(self) -> AEADEncryptionContext:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        context = Cipher(AES256(self._key), GCM(self._nonce)).encryptor()
        context.authenticate_additional_data(self._joined)
        return context

    def check(self, tag: bytes | memoryview) -> None:
        """Raise SealError unless `tag` is the tag of all bytes added."""
        if not hmac.compare_digest(self.tag(), tag):
            raise SealError(_FORGED)


_FORGED = (
    "its tag is wrong: somebody on the way changes, repeats or leaves out what we are sent, or a "
    "middlebox does; TLS keeps him from reading as well"
)


class FrameSeals(NamedTuple):
    """The seals of both directions at one end, and whether raw bytes have tags too."""

    sending: Seal
    receiving: Seal
    of_bytes: bool = False
