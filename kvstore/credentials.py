"""Who may speak to whom over the network: a shared token, and optionally TLS.

The token never travels. Each side proves that it knows it by an HMAC over both sides' nonces, with
a word for the direction in it, so that a proof can't be sent back to its maker or used again.
Without TLS an eavesdropper learns no token, but sees block bytes; with `tls_ca` and a certificate
of its own (mTLS) each side also knows the other's name. See docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.messenger.tls import client_tls, server_tls

from .errors import InvalidInput

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

NONCE_BYTES = 16
# Shorter tokens can be guessed offline by who has seen one handshake.
TOKEN_BYTES_MIN = 16
TOKEN_BYTES_MAX = 4096
# The longest name that DNS has. What would be another part of a URL, or is not printable, is none.
HOST_BYTES_MAX = 253
_NO_HOST = re.compile(r"[@/\\\s\x00-\x1f\x7f]")
TOKEN_FILE_VARIABLE = "TIFFIN_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one side of a connection knows and shows. `repr` hides the token."""

    token: bytes = b""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __repr__(self) -> str:
        return f"Credentials(token={'set' if self.token else 'none'}, tls_ca={self.tls_ca})"

    @property
    def authenticates(self) -> bool:
        """Whether a node with these lets in only whom it knows."""
        return bool(self.token) or self.tls_ca is not None

    def server_context(self) -> ssl.SSLContext | None:
        """TLS for a listening node: with `tls_ca`, clients have to show a certificate of it."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_ca is not None or self.tls_cert is not None or self.tls_key is not None:
                raise InvalidInput("a node with TLS needs --tls-cert and --tls-key")
            return None
        try:
            return server_tls(self.tls_cert, self.tls_key, self.tls_ca)
        except OSError as error:
            raise InvalidInput(f"can't load the TLS certificate or key: {error}") from error

    def client_context(self) -> ssl.SSLContext | None:
        """TLS for a connecting client; None without `tls_ca`. Raises InvalidInput for a certificate
        alone: who shows one means to use TLS, and would go without."""
        if self.tls_ca is None:
            if self.tls_cert is not None:
                raise InvalidInput(
                    "a certificate is only shown to who can be checked: give tls_ca as well"
                )
            return None
        try:
            return client_tls(self.tls_ca, self.tls_cert, self.tls_key)
        except OSError as error:
            raise InvalidInput(f"can't load the TLS certificate or key: {error}") from error

    def prove(self, direction: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        """32 bytes that only who knows the token can make; empty without a token.

        `direction` is b"client" or b"node", whoever proves.
        """
        if not self.token:
            return b""
        text = b"tiffin v1 " + direction + b"\0" + client_nonce + server_nonce
        return hmac.digest(self.token, text, hashlib.sha256)

    def accepts(
        self, proof: bytes, direction: bytes, client_nonce: bytes, server_nonce: bytes
    ) -> bool:
        """Whether `proof` is the other side's right one; always without a token."""
        return hmac.compare_digest(proof, self.prove(direction, client_nonce, server_nonce))


def load_credentials(
    token_file: Path | str | None = None,
    tls_ca: Path | str | None = None,
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> Credentials:
    """Credentials from files; the token's file may also be named by TIFFIN_TOKEN_FILE.

    Raises InvalidInput for a file that can't be read, that others can read, or a short token.
    """
    chosen = token_file or environ.get(TOKEN_FILE_VARIABLE)
    token = read_token(Path(chosen)) if chosen else b""
    ca, cert, key = (Path(p) if p else None for p in (tls_ca, tls_cert, tls_key))
    if (cert is None) != (key is None):
        raise InvalidInput("a TLS certificate and its key go together: give both or neither")
    return Credentials(token, ca, cert, key)


def read_token(path: Path) -> bytes:
    """The token in `path`, without surrounding white space."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(2 * TOKEN_BYTES_MAX).strip()
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        raise InvalidInput(f"can't read the token file: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(f"{path} can be read by others; run: chmod 600 {path}")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise InvalidInput(
            f"the token in {path} has {len(token)} bytes; it takes {TOKEN_BYTES_MIN} to "
            f"{TOKEN_BYTES_MAX}. Make one with: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


def parse_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` -> (host, port). Raises InvalidInput."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidInput(f"{text!r}: write an IPv6 address in brackets, [::1]:7700")
    numeric = len(port) <= 5 and port.isascii() and port.isdigit()
    if not colon or not _is_host(host) or not numeric or int(port) > 65535:
        raise InvalidInput(f"{text!r} is not an address; write HOST:PORT, such as 10.0.0.5:7700")
    return host, int(port)


def _is_host(host: str) -> bool:
    """Whether `host` can be a name or an address at all: the resolver is not asked for others."""
    try:
        encoded = host.encode("idna")  # labels of 1 to 63 bytes
    except UnicodeError:
        return False
    return 0 < len(encoded) <= HOST_BYTES_MAX and not _NO_HOST.search(host)


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for can only be reached from this machine."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise InvalidInput(f"{host!r} is not the name of a host: {error}") from error
    return all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)
