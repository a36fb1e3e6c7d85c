"""Shared by the processes of conductor and gateway: a listening socket, TLS, a web server and its
start-up log messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from tiffin.kvstore.errors import InvalidInput
from tiffin.messenger.tcp.tls_context import server_tls

from .http_protocol import LimitedProtocol, WebConfig

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..web.auth import Tokens
    from ..web.connection_limits import ConnectionLimits

log = logging.getLogger("tiffin.conductor")

# Longer than clients keep idle connections: a connection that the server closes just as a client
# uses it costs a retry.
_KEEP_ALIVE_S = 75
# Open files besides client connections: libraries, feeds, connections to engines.
_OTHER_FILES = 2048


@contextlib.contextmanager
def listening(address: tuple[str, int], *, shared: bool = False) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes any free port. `shared`: with other processes of this user,
    and the kernel spreads the connections. Raises InvalidInput."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=1024, reuse_port=shared)
        # Accepted connections inherit TCP_NODELAY. uvloop sets it on all of them, asyncio does not
        # set it on these; without it each answer waits 40 ms for an acknowledgement.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise InvalidInput(f"can't listen at {host}:{port}: {error.strerror or error}") from error
    with door:
        yield door


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises InvalidInput for a certificate without a key, or the reverse."""
    if (cert is None) != (key is None):
        raise InvalidInput("a TLS certificate and its key go together: give both or neither")


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a server; None without a certificate. Raises InvalidInput for files that
    are not a certificate and its key."""
    if cert is None or key is None:
        return None
    try:
        return server_tls(cert, key)
    except OSError as error:  # SSLError is one
        raise InvalidInput(
            f"can't load the TLS certificate {cert} with the key {key}: {error}"
        ) from error


def web_server(
    app: Any, limits: ConnectionLimits, *, stop_s: int, tls: ssl.SSLContext | None
) -> uvicorn.Server:
    """A web server whose graceful shutdown gives in-flight requests `stop_s` to finish."""
    config = WebConfig(
        app,
        limits,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,
    )
    config.load()
    _make_room(limits)
    # uvicorn would create its own TLS context when it serves, too late for an error message that an
    # operator understands; in older versions that context allows for TLS 1.2 only the ciphers of
    # TLS 1.0.
    config.ssl = tls
    return _Server(config)


def url_of(door: socket.socket, *, tls: bool) -> str:
    """The URL of a server that listens there."""
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


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
    """Log the server's URL: `answers` has a %s for it. Warn if there are no tokens, or no TLS:
    `seen` names what an eavesdropper could read. Call `started` with the address."""
    host, port = door.getsockname()[:2]
    log.info(answers, url_of(door, tls=tls))
    if not tokens:
        log.warning("there are no tokens: every user of this machine can use it")
    elif not tls and not host.startswith("127."):
        log.warning("there is no TLS: who listens to this network can read %s", seen)
    if started is not None:
        started((host, port))


def _make_room(limits: ConnectionLimits) -> None:
    """Raise this process' limit of open files to the number of connections, as far as the hard
    limit allows."""
    wanted = limits.connections + limits.strangers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
        if hard < wanted:
            log.warning(
                "this process may open %d files, and needs %d for all connections: raise ulimit -n",
                hard,
                wanted,
            )


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling: uvicorn would raise a signal again after its
    shutdown, and the process would seem to have been killed. And the timeout of a TLS handshake is
    that of a head, not a minute."""

    config: WebConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the given sockets."""
        loop = asyncio.get_running_loop()
        make = partial(LimitedProtocol, self.config, self.server_state, {}, loop)
        tls = self.config.ssl
        self.servers = [
            await loop.create_server(
                make,
                sock=door,
                ssl=tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=None if tls is None else self.config.table.limits.head_s,
            )
            for door in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
