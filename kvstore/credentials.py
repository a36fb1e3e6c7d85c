"""Credentials for authentication between nodes and clients: a shared token, and optionally TLS.

The token is never sent over the network. `token_proofs.py` has the proofs of the token, and the
keys that authenticate frames. Without TLS an eavesdropper does not learn the token, but sees block
bytes. With `tls_ca` a client verifies the node's certificate and its name in it, and a node
verifies that its clients' certificates are of that CA (mTLS). See docs/security.md.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.messenger.tcp.tls_context import client_tls, server_tls
from tiffin.messenger.wire.frame_tags import can_tag_bytes

from .errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

NONCE_BYTES = 16
# An eavesdropper with one handshake can guess shorter tokens offline.
TOKEN_BYTES_MIN = 16
TOKEN_BYTES_MAX = 4096
# The longest DNS name. A host has no characters that delimit parts of a URL, no white space and no
# control characters.
HOST_BYTES_MAX = 253
_NO_HOST = re.compile(r"[@/\\\s\x00-\x1f\x7f]")
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
# What carries an authentication tag: frames only, or the bytes of blocks too.
AUTHENTICATED = ("frames", "bytes")
TAGS_MISSING = 'tags of bytes need a library; run: pip install "tiffin[authenticate]"'
TOKEN_FILE_VARIABLE = "TIFFIN_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token and TLS files of one side of a connection. `repr` hides the token. `of_bytes`:
    require authentication tags for the bytes of blocks too, not for frames only."""

    token: bytes = b""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    of_bytes: bool = False

    def __post_init__(self) -> None:
        if self.of_bytes and not self.token:
            raise InvalidInput("authenticate=bytes takes a token: give token_file as well")
        if self.of_bytes and not can_tag_bytes():
            raise InvalidInput(f"authenticate=bytes: {TAGS_MISSING}")

    def __repr__(self) -> str:
        return f"Credentials(token={'set' if self.token else 'none'}, tls_ca={self.tls_ca})"

    @property
    def authenticates(self) -> bool:
        """Whether a node with these credentials authenticates its clients."""
        return bool(self.token) or self.tls_ca is not None

    def server_context(self) -> ssl.SSLContext | None:
        """The TLS context of a listening node; None without certificate and key. With `tls_ca`,
        clients must present a certificate that it signed. Raises InvalidInput."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_ca is not None or self.tls_cert is not None or self.tls_key is not None:
                raise InvalidInput("a node with TLS needs --tls-cert and --tls-key")
            return None
        try:
            return server_tls(self.tls_cert, self.tls_key, self.tls_ca)
        except OSError as error:
            raise InvalidInput(f"can't load the TLS certificate or key: {error}") from error

    def client_context(self) -> ssl.SSLContext | None:
        """The TLS context of a connecting client; None without `tls_ca`. Raises InvalidInput for a
        certificate without `tls_ca`: its user means to use TLS, and would connect without it."""
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

    def server_binding(self) -> bytes:
        """The channel binding of this node's greetings: the SHA-256 of its certificate, which is
        the first in its file. Empty without TLS, or without a token to prove it with. Raises
        InvalidInput."""
        if self.tls_cert is None or not self.token:
            return b""
        try:
            # Other text may surround the certificates.
            certificates = self.tls_cert.read_text(encoding="latin-1")
            begin = certificates.index(_CERTIFICATE)
            end = certificates.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
            return binding_of(ssl.PEM_cert_to_DER_cert(certificates[begin:end]))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"can't read {self.tls_cert}: {error}") from error


def binding_of(certificate: bytes) -> bytes:
    """The channel binding of a greeting: the SHA-256 of the certificate (DER) that the node
    presents on this TLS connection; `b""` without TLS."""
    return hashlib.sha256(certificate).digest() if certificate else b""


def load_credentials(
    token_file: Path | str | None = None,
    tls_ca: Path | str | None = None,
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
    authenticate: str = "frames",
    *,
    environ: Mapping[str, str] = os.environ,
) -> Credentials:
    """Load credentials from files; TIFFIN_TOKEN_FILE names the token file if `token_file` does not.

    Raises InvalidInput for an unreadable file, a token file that other users can access, a token of
    the wrong length, or a certificate without its key.
    """
    chosen = token_file or environ.get(TOKEN_FILE_VARIABLE)
    token = read_token(Path(chosen)) if chosen else b""
    ca, cert, key = (Path(p) if p else None for p in (tls_ca, tls_cert, tls_key))
    if (cert is None) != (key is None):
        raise InvalidInput("a TLS certificate and its key go together: give both or neither")
    if authenticate not in AUTHENTICATED:
        raise InvalidInput(f"authenticate={authenticate!r}: choose {' or '.join(AUTHENTICATED)}")
    return Credentials(token, ca, cert, key, of_bytes=authenticate == "bytes")


def read_token(path: Path) -> bytes:
    """The token in `path`, without surrounding white space. Raises InvalidInput."""
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


def format_address(address: tuple[str, int]) -> str:
    """`host:port`, or `[v6]:port`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_socket(address: tuple[str, int]) -> str:
    """A socket's address with a numeric host; the same text at both ends of a connection, even if
    only one of them uses IPv4-mapped IPv6."""
    host, port = address
    number = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)  # how an IPv6 socket shows an IPv4 peer
    return format_address((str(mapped or number), port))


def _is_host(host: str) -> bool:
    """Whether `host` has the syntax of a name or an address; only then do we call the resolver."""
    try:
        encoded = host.encode("idna")  # labels of 1 to 63 bytes
    except UnicodeError:
        return False
    return 0 < len(encoded) <= HOST_BYTES_MAX and not _NO_HOST.search(host)


def is_loopback(host: str) -> bool:
    """Whether `host` resolves to loopback addresses only. Raises InvalidInput if it
    does not resolve."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise InvalidInput(f"{host!r} is not the name of a host: {error}") from error
    return all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)
