"""Proofs of the pool's token: makes and verifies HMACs, and derives keys. No I/O; docs/security.md.

Every proof is an HMAC-SHA256, keyed by the token or by a key derived from it, over a text that
includes the proof's purpose, and in which each part has its length in front: no proof is valid for
another purpose, or for other parts. Without a token the key is empty: proofs are then only
checksums that anyone can compute.
"""

from __future__ import annotations

import hashlib
import hmac

STAMP_BYTES = 32


def joined(*parts: bytes) -> bytes:
    """The parts, each after its length as u32 little-endian; no other parts give the same bytes."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(4, "little"), part))


def stamp(token: bytes, purpose: str, pool: str, body: bytes) -> bytes:
    """The stamp of `body`: its 32-byte HMAC for this purpose in the pool of this name."""
    text = joined(b"tiffin 2", purpose.encode(), pool.encode(), body)
    return hmac.digest(token, text, hashlib.sha256)


def is_stamped(token: bytes, purpose: str, pool: str, body: bytes, found: bytes) -> bool:
    """Whether `found` is the stamp of `body`; compares in constant time."""
    return hmac.compare_digest(found, stamp(token, purpose, pool, body))


class Greeting:
    """The greeting (handshake) of one connection, the same at both ends: the proof of each end, and
    the keys derived from the messages.

    `binding` is the SHA-256 of the node's certificate, if there is TLS. The messages are the bytes
    sent, without their proofs. A peer without the token can compute neither proof nor key; a relay
    between two peers cannot change the messages, and has no key either.
    """

    __slots__ = ("_root",)

    def __init__(self, token: bytes, binding: bytes, challenge: bytes, hello: bytes) -> None:
        text = joined(b"tiffin 2", b"greeting", binding, challenge, hello)
        self._root = hmac.digest(token, text, hashlib.sha256)

    def client_proof(self) -> bytes:
        """The client's proof: 32 bytes in its hello."""
        return self._derived(b"client")

    def node_proof(self, welcome: bytes) -> bytes:
        """The node's proof: 32 bytes in its welcome."""
        return self._derived(b"node", welcome)

    def keys(self, welcome: bytes) -> tuple[bytes, bytes]:
        """The keys that authenticate frames: to the node, and to the client."""
        return self._derived(b"to the node", welcome), self._derived(b"to the client", welcome)

    def _derived(self, *parts: bytes) -> bytes:
        return hmac.digest(self._root, joined(*parts), hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(one, other)
