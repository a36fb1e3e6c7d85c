"""Authorisation over HTTP: bearer tokens from a file, each with its rights.

A line of the file is a token, alone or after its rights:

    # monitoring and dashboards
    read 5c1f...
    schedule,read 9be0...
    operate 77d2...
    instance:prefill-3 0be1...     may act as this instance
    instance:vllm-* c64e...        may act as any of these instances
    schedule,read,client:app 1f7b...   named `app` in the gateway's limits
    a3f4...                        all rights: what `tiffin token PATH` writes

Clients send tokens in the header `Authorization: Bearer TOKEN`, so over a network that can be
eavesdropped on the service needs TLS. Without tokens it listens on loopback only, and serves every
user of this machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tiffin.kvstore.credentials import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, is_loopback
from tiffin.kvstore.errors import InvalidInput

from ..errors import NotAuthorized

if TYPE_CHECKING:
    from pathlib import Path

# One for each of a thousand instances, and some for other clients.
TOKENS_MAX = 1088
_FILE_BYTES_MAX = 1 << 20
# The characters that RFC 6750 allows in a bearer token: printable, no space, fit for a header.
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]+\Z")


class Right(StrEnum):
    """A right of a token. No right includes another."""

    READ = "read"  # every GET, and the lookup of a prefix's holders
    SCHEDULE = "schedule"  # decisions, and events of requests
    OPERATE = "operate"  # instances and settings
    INSTANCE = "instance"  # registration, heartbeats and removal of the token's own instance


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of a token: `rights`, and to act as any of `instances`, given by id or, with
    a `*` at the end, by a prefix of the id. `client` is the name of those who use it, "" without
    one: several tokens may have the same."""

    rights: frozenset[Right] = frozenset()
    instances: tuple[str, ...] = ()
    client: str = ""

    def allows(self, right: Right, instance: str | None = None) -> bool:
        """Whether the token has `right`, or may act as `instance`."""
        return right in self.rights or (
            instance is not None and any(_is_one_of(instance, own) for own in self.instances)
        )

    def __str__(self) -> str:
        own = (f"{Right.INSTANCE}:{name}" for name in self.instances)
        return ", ".join([*(right for right in Right if right in self.rights), *own])


@dataclass(frozen=True, slots=True)
class Tokens:
    """The known tokens, as digests: neither a `repr` nor a dump of the memory's strings shows a
    token."""

    known: dict[bytes, Grant] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.known)

    def __repr__(self) -> str:
        return f"Tokens({len(self.known)})"

    def grant(self, token: bytes) -> Grant | None:
        """The permissions of `token`; None if it is unknown. The lookup is not constant-time, but
        its timing leaks only something about the digest, which does not reveal the token."""
        return self.known.get(hashlib.sha256(token).digest())

    def check(self, authorization: bytes, right: Right, instance: str | None = None) -> None:
        """Check that a token has `right`. Raises NotAuthorized, which says what is missing.
        `authorization` is the header's value, b"" without one. `instance`: a token that may act as
        this instance suffices, too. Without any known tokens everything is allowed."""
        if not self.known:
            return
        token = bearer(authorization)
        if not token:
            raise NotAuthorized("send a token: Authorization: Bearer TOKEN")
        grant = self.grant(token)
        if grant is None:
            raise NotAuthorized("this token is not known here")
        if not grant.allows(right, instance):
            own = "" if instance is None else f" or {Right.INSTANCE}:{instance[:256]}"
            raise MissingRight(f"this token allows {grant}, and this takes {right}{own}")


class MissingRight(NotAuthorized):
    """The token is known, but lacks the right."""


def bearer(authorization: bytes) -> bytes:
    """The bearer token in the value of an Authorization header; b"" if there is none."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def load_tokens(path: Path) -> Tokens:
    """Read a token file. Raises InvalidInput for a file that can't be read, that other users have
    access to, that has no token or too many, or that has an invalid line."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise InvalidInput(f"can't read the token file: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(f"{path} can be read by others; run: chmod 600 {path}")
    known: dict[bytes, Grant] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split(b"#")[0].split()
        if words:
            grant, token = _parse(words, f"{path}, line {number}")
            known[hashlib.sha256(token).digest()] = grant
    if not 0 < len(known) <= TOKENS_MAX:
        raise InvalidInput(
            f"{path} has {len(known)} tokens; it takes 1 to {TOKENS_MAX}. Make one: "
            "tiffin token PATH"
        )
    return Tokens(known)


def check_listen(host: str, tokens: Tokens) -> None:
    """Check that the service may listen at `host`. Raises InvalidInput unless `host` is loopback or
    there are tokens: otherwise every client that can reach the service could flip roles and change
    settings."""
    if not tokens and not is_loopback(host):
        raise InvalidInput(
            f"listening on {host} lets in whoever can reach it: give --token-file (tiffin token "
            "PATH makes one), or listen on 127.0.0.1"
        )


def _parse(words: list[bytes], where: str) -> tuple[Grant, bytes]:
    """Parse a line into its permissions and its token. Error messages do not repeat the token,
    which is a secret."""
    *named, token = words
    grant = Grant(ALL_RIGHTS)
    if named:
        try:
            grant = _grant(named[0].decode().split(","))
        except ValueError as error:  # UnicodeDecodeError is one
            raise InvalidInput(
                f"{where}: write RIGHTS TOKEN, rights being of {', '.join(_WORDS)}, with commas"
            ) from error
    if len(named) > 1 or not _TOKEN.match(token):
        raise InvalidInput(f"{where}: one token per line, of letters, digits and ._~+/=-")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise InvalidInput(
            f"{where}: the token has {len(token)} bytes; it takes {TOKEN_BYTES_MIN} to "
            f"{TOKEN_BYTES_MAX}"
        )
    return grant, token


# The rights as written in the file. The right `instance` names the instance; `operate` covers all
# instances.
_WORDS = (
    *(f"{right}:ID" if right is Right.INSTANCE else str(right) for right in Right),
    "client:NAME",
)


def _grant(words: list[str]) -> Grant:
    """Parse a list of rights. Raises ValueError for a word that is no right."""
    rights, instances, client = set[Right](), list[str](), ""
    for word in words:
        right, colon, name = word.partition(":")
        if right == "client" and name and not client:
            client = name
            continue
        if bool(name) != (Right(right) is Right.INSTANCE) or bool(colon) != bool(name):
            raise ValueError(word)
        if name:
            instances.append(name)
        else:
            rights.add(Right(right))
    if not rights and not instances:
        raise ValueError("a client without rights")
    return Grant(frozenset(rights), tuple(instances), client)


def _is_one_of(instance: str, name: str) -> bool:
    return instance.startswith(name[:-1]) if name.endswith("*") else instance == name
