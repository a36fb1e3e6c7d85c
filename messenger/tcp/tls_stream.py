"""A TLS connection: with Python's socket timeouts, one record of 16 KiB at a time."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ..wire.cursor import Cursor
from .socket_timeouts import WAIT_S_MAX, WAIT_S_MIN
from .stream import Stream

if TYPE_CHECKING:
    import ssl

# The most that one TLS record holds (RFC 8446, 5.1).
_RECORD_BYTES = 16 << 10


class TlsStream(Stream):
    """TCP inside TLS, after the handshake. Not optimised further: encryption costs more than any
    optimisation here would save."""

    _socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Takes over a connected socket after its TLS handshake."""
        super().__init__(sock)
        self._record = memoryview(bytearray(_RECORD_BYTES))

    @property
    def peer_certificate(self) -> bytes:
        """See `Stream.peer_certificate`."""
        return self._socket.getpeercert(binary_form=True) or b""

    def alive(self) -> bool:
        """See `Stream.alive`. Unread bytes may be TLS's own, such as session tickets."""
        try:
            self._socket.settimeout(0.0)
            return bool(socket.socket.recv(self._socket, 1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive_some(self, views: list[memoryview], wait_s: float, *, whole: bool) -> int:
        if len(views) > 1 and len(views[0]) < _RECORD_BYTES:
            # Many small views: receive a whole record and copy it, instead of one call per view.
            room = self._record[: min(_RECORD_BYTES, sum(map(len, views)))]
            nbytes = self._receive_record(room, wait_s)
            Cursor(views).fill(room[:nbytes])
            return nbytes
        return self._receive_record(views[0], wait_s)

    def _receive_record(self, view: memoryview, wait_s: float) -> int:
        try:
            self._socket.settimeout(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))
            nbytes = self._socket.recv_into(view)
        except TimeoutError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if not nbytes:
            raise self._lost("the peer closed it")
        return nbytes

    def _send_some(self, views: list[memoryview], wait_s: float) -> int:
        # Join small views: each call makes a TLS record.
        data = views[0]
        if len(views) > 1 and len(data) < _RECORD_BYTES:
            data = _joined(views)
        try:
            self._socket.settimeout(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))
            return self._socket.send(data)
        except TimeoutError:
            return 0
        except OSError as error:
            raise self._lost(error) from error


def _joined(views: list[memoryview]) -> memoryview:
    """The leading bytes of `views`, one TLS record of them, copied together."""
    joined = bytearray()
    for view in views:
        joined += view[: _RECORD_BYTES - len(joined)]
        if len(joined) == _RECORD_BYTES:
            break
    return memoryview(joined)
