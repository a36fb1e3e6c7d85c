"""The file of a listening unix socket.

Two nodes may start, stop and lose their files at the same moment: who looks at the file and then
changes it holds a lock of its folder meanwhile, so that nothing is left behind beside the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

from ...errors import NodeUnavailable, TiffinError
from ...text import check_socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Others hold the lock for some system calls and a connection to a node that is alive.
_LOCK_S = 5.0
_POLL_S = 0.01
_PROBE_S = 1.0
_BACKLOG = 128


class SocketFile:
    """A unix socket's file that this process made at `path`, once `listen` has returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: int | None = None  # while it is open, no other file gets its inode's number

    def listen(self) -> socket.socket:
        """A socket that listens at the path, in place of a file that a killed node has left.

        Raises NodeUnavailable: a node listens there, something else than a socket is there, the
        folder is another user's, or the system refuses; InvalidInput for a path that is too long.
        """
        check_socket_path(self.path)
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            with self._locked():
                self._remove_stale()
                old_mask = os.umask(0o177)
                try:
                    sock.bind(str(self.path))
                finally:
                    os.umask(old_mask)
                sock.listen(_BACKLOG)
                self._made = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            sock.setblocking(False)
        except TiffinError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise NodeUnavailable(f"can't listen on {self.path}: {error}") from error
        return sock

    def is_there(self) -> bool:
        """Whether clients that connect to the path reach the socket of the last `listen`."""
        if self._made is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._made), os.lstat(self.path))
        return False

    def remove(self) -> None:
        """Remove the file, unless it is another's by now. Raises nothing."""
        with contextlib.suppress(OSError, NodeUnavailable), self._locked():
            if self.is_there():
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Forget the file; it stays."""
        made, self._made = self._made, None
        if made is not None:
            os.close(made)

    def _check_folder(self) -> None:
        owner = self.path.parent.stat().st_uid
        if owner not in (0, os.getuid()):
            raise NodeUnavailable(
                f"{self.path.parent} belongs to user {owner}, who could replace the socket"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise NodeUnavailable(
                            f"another process keeps {self.path.parent} locked; "
                            "choose a --socket in a folder of its own"
                        ) from None
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(folder)

    def _remove_stale(self) -> None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise NodeUnavailable(
                f"{self.path} is there already and is no socket; choose another --socket"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise NodeUnavailable(f"another node listens on {self.path}; choose another --socket")
