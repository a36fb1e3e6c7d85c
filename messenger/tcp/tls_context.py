"""TLS contexts for both ends. TLS 1.2 at least; certificates are files in PEM."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def server_tls(cert: str | Path, key: str | Path, ca: str | Path | None = None) -> ssl.SSLContext:
    """The TLS context of a `Listener`. Given `ca`, clients have to present a certificate signed by
    it.

    Raises OSError and ssl.SSLError for files that are missing or not what they should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(
    ca: str | Path, cert: str | Path | None = None, key: str | Path | None = None
) -> ssl.SSLContext:
    """The TLS context of `connect`: the server has to present a certificate signed by `ca` for the
    name that the client connects to. `cert` and `key` are the client's own, for a server that
    requires them.

    Raises OSError and ssl.SSLError for files that are missing or not what they should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
