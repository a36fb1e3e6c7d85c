"""What the processes of conductor and gateway share: a port, a web server on it, first words."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from tiffin.kvstore.errors import InvalidInput
from tiffin.messenger.tls import server_tls

if TYPE_CHECKING:
    import logging
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .auth import Tokens

# Longer than clients keep idle connections: a connection that ends while it is used costs a retry.
_KEEP_ALIVE_S = 75


@contextlib.contextmanager
def listening(address: tuple[str, int]) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes any. Raises InvalidInput."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=1024)
        # Connections inherit it. uvloop sets it on all of them, asyncio alone not on these; and
        # without it each answer waits 40 ms for an acknowledgement.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise InvalidInput(f"can't listen at {host}:{port}: {error.strerror or error}") from error
    with door:
        yield door


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises InvalidInput for one without the other."""
    if (cert is None) != (key is None):
        raise InvalidInput("a TLS certificate and its key go together: give both or neither")


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What a server proves itself with; None without a certificate. Raises InvalidInput for files
    that are no certificate and its key."""
    if cert is None or key is None:
        return None
    try:
        return server_tls(cert, key)
    except OSError as error:  # SSLError is one
        raise InvalidInput(
            f"can't load the TLS certificate {cert} with the key {key}: {error}"
        ) from error


def web_server(
    app: Any, *, connections: int, stop_s: int, tls: ssl.SSLContext | None
) -> uvicorn.Server:
    """A server of so many connections, that has `stop_s` to finish what is under way."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        limit_concurrency=connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,
    )
    config.load()
    # uvicorn would make its own when it serves, too late for an error that an operator understands;
    # that of older versions has no ciphers for TLS 1.2 but those of TLS 1.0.
    config.ssl = tls
    return _Server(config)


def announce(
    log: logging.Logger,
    door: socket.socket,
    answers: str,
    seen: str,
    *,
    tokens: Tokens,
    tls: bool,
    started: Callable[[tuple[str, int]], None] | None,
) -> None:
    """Say where it answers: `answers` has a %s for the URL. `seen` is what a listener on the
    network could read without TLS."""
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info(answers, f"{'https' if tls else 'http'}://{shown}:{port}")
    if not tokens:
        log.warning("there are no tokens: every user of this machine can use it")
    elif not tls and not host.startswith("127."):
        log.warning("there is no TLS: who listens to this network can read %s", seen)
    if started is not None:
        started((host, port))


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after its end, and the process would seem
    to have been killed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
