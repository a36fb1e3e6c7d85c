"""Who may do what over HTTP: bearer tokens from a file, each with its rights.

A line of the file is a token, alone or after what it allows:

    # who scrapes and looks
    read 5c1f...
    schedule,read 9be0...
    operate 77d2...
    a3f4...                    all rights: what `tiffin token PATH` writes

Tokens travel in the header `Authorization: Bearer TOKEN`, so over a network that others can listen
to the service needs TLS. Without tokens it answers on loopback only, to everybody of this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tiffin.kvstore.credentials import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, is_loopback
from tiffin.kvstore.errors import InvalidInput

from .errors import NotAuthorized

if TYPE_CHECKING:
    from pathlib import Path

# Every one of them is compared with each request's token: 64 cost 10 µs.
TOKENS_MAX = 64
_FILE_BYTES_MAX = 1 << 20
# What RFC 6750 lets a bearer token be: printable, no space, fit for a header.
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]+\Z")


class Right(StrEnum):
    """What a token allows. None includes another."""

    READ = "read"  # every GET, and who holds a prefix
    SCHEDULE = "schedule"  # decisions, and what became of requests
    OPERATE = "operate"  # instances and settings


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Known tokens, as digests: neither a `repr` nor a dump of memory's strings shows one."""

    known: tuple[tuple[bytes, frozenset[Right]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.known)

    def __repr__(self) -> str:
        return f"Tokens({len(self.known)})"

    def rights(self, token: bytes) -> frozenset[Right]:
        """What `token` allows; nothing if it is unknown. Takes as long for every token: all known
        ones are compared, and each comparison looks at all bytes."""
        digest = hashlib.sha256(token).digest()
        found: frozenset[Right] = frozenset()
        for known, rights in self.known:
            if hmac.compare_digest(known, digest):
                found = rights
        return found

    def check(self, authorization: bytes, right: Right) -> None:
        """Raises NotAuthorized, which says what is missing. `authorization` is the header's value,
        b"" without one. Without any known tokens everything is allowed."""
        if not self.known:
            return
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise NotAuthorized("send a token: Authorization: Bearer TOKEN")
        rights = self.rights(token.strip())
        if not rights:
            raise NotAuthorized("this token is not known here")
        if right not in rights:
            raise MissingRight(f"this token allows {_words(rights)}, and this takes {right}")


class MissingRight(NotAuthorized):
    """The token is known, and does not allow this."""


def load_tokens(path: Path) -> Tokens:
    """The tokens of a file. Raises InvalidInput for one that cannot be read, that others can read,
    that has no token, or a line that is none."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise InvalidInput(f"can't read the token file: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(f"{path} can be read by others; run: chmod 600 {path}")
    known: dict[bytes, frozenset[Right]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split(b"#")[0].split()
        if words:
            rights, token = _parse(words, f"{path}, line {number}")
            known[hashlib.sha256(token).digest()] = rights
    if not 0 < len(known) <= TOKENS_MAX:
        raise InvalidInput(
            f"{path} has {len(known)} tokens; it takes 1 to {TOKENS_MAX}. Make one: "
            "tiffin token PATH"
        )
    return Tokens(tuple(known.items()))


def check_listen(host: str, tokens: Tokens) -> None:
    """Whether the service may listen at `host`. Raises InvalidInput: without tokens, everybody who
    can reach it could flip roles and change settings."""
    if not tokens and not is_loopback(host):
        raise InvalidInput(
            f"listening on {host} lets in whoever can reach it: give --token-file (tiffin token "
            "PATH makes one), or listen on 127.0.0.1"
        )


def _parse(words: list[bytes], where: str) -> tuple[frozenset[Right], bytes]:
    """The rights and the token of a line. Messages do not repeat it: it is a secret."""
    *named, token = words
    rights = ALL_RIGHTS
    if named:
        try:
            rights = frozenset(Right(name.decode("ascii")) for name in named[0].split(b","))
        except ValueError as error:  # UnicodeDecodeError is one
            raise InvalidInput(
                f"{where}: write RIGHTS TOKEN, rights being of {_words(ALL_RIGHTS)}, with commas"
            ) from error
    if len(named) > 1 or not _TOKEN.match(token):
        raise InvalidInput(f"{where}: one token per line, of letters, digits and ._~+/=-")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise InvalidInput(
            f"{where}: the token has {len(token)} bytes; it takes {TOKEN_BYTES_MIN} to "
            f"{TOKEN_BYTES_MAX}"
        )
    return rights, token


def _words(rights: frozenset[Right]) -> str:
    return ", ".join(right for right in Right if right in rights)
