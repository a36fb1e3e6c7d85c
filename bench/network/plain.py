"""The limit of all transfers over a network: the same bytes over a socket without a protocol.

A process of its own sends from memory of the same size, from `sendall` to `recv_into`, without
checksums, keys or leases. `python -m tiffin.bench.network.plain BYTES` is that process.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from ..limits import touched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..limits import Bytes

# The offset in the sender's memory, and the number of bytes.
_REQUEST = struct.Struct("<QQ")
# Bytes per system call at both ends. From 64 KiB to 128 MiB the rate was the same within the noise,
# and from this size on the CPU time was the least.
_CALL_BYTES = 8 << 20


class PlainSockets:
    """A connection to a process that sends the requested bytes of its memory."""

    def __init__(self, nbytes: int) -> None:
        command = [sys.executable, "-m", "tiffin.bench.network.plain", str(nbytes)]
        self._nbytes = nbytes
        self._sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._sender.stdout is not None
        self.pid = self._sender.pid
        try:
            port = int(self._sender.stdout.readline())
            self._socket = socket.create_connection(("127.0.0.1", port))
        except (OSError, ValueError):
            self._sender.kill()
            self._end()
            raise
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, targets: Sequence[Bytes], at: int = 0) -> None:
        """Fill `targets`, one after the other, with the sender's memory from offset `at` on."""
        self._socket.sendall(_REQUEST.pack(at, sum(len(target) for target in targets)))
        receive = self._socket.recv_into
        for target in targets:
            view, done = target.data, 0
            while done < len(view):
                nbytes = receive(view[done : done + _CALL_BYTES], 0, socket.MSG_WAITALL)
                if not nbytes:
                    raise ConnectionError("the sending process has ended")
                done += nbytes

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        self._end()

    def _end(self) -> None:
        for pipe in (self._sender.stdin, self._sender.stdout):
            if pipe is not None:
                pipe.close()
        self._sender.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Send to the first client that connects, until it disconnects."""
    memory = touched(int(sys.argv[1])).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        peer, _ = listener.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(request := peer.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
            at, nbytes = _REQUEST.unpack(request)
            for begin in range(at, at + nbytes, _CALL_BYTES):
                peer.sendall(memory[begin : min(at + nbytes, begin + _CALL_BYTES)])


if __name__ == "__main__":
    main()
