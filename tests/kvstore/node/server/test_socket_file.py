"""The file of a node's socket: whose it is, and that nobody else's is ever removed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore import Client
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable
from tiffin.kvstore.node.server.socket_file import SocketFile
from tiffin.kvstore.text import SOCKET_PATH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # folders of tests are longer than a socket's path may be
    return tmp_path.relative_to(tmp_path) / "n.sock"


@pytest.fixture
def file(path: Path) -> Iterator[SocketFile]:
    one = SocketFile(path)
    yield one
    one.remove()


def leave_a_stale_one(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))


def test_it_is_there_while_it_listens(file: SocketFile) -> None:
    assert not file.is_there()
    with file.listen():
        assert file.is_there()
        assert file.path.stat().st_mode & 0o777 == 0o600
        file.remove()
        assert not file.is_there()
        assert not file.path.exists()


def test_that_of_a_killed_node_is_replaced(file: SocketFile) -> None:
    leave_a_stale_one(file.path)
    with file.listen():
        assert file.is_there()


def test_a_file_of_somebody_stays(file: SocketFile) -> None:
    file.path.write_text("precious")
    with pytest.raises(NodeUnavailable, match="is no socket; choose another --socket"):
        file.listen()
    file.remove()
    assert file.path.read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_so_does_whatever_else_is_no_socket(file: SocketFile, make) -> None:
    make(file.path)
    with pytest.raises(NodeUnavailable, match="is no socket"):
        file.listen()
    file.remove()
    assert os.path.lexists(file.path)


def test_of_many_that_start_on_a_stale_one_one_listens(path: Path) -> None:
    for _ in range(20):
        leave_a_stale_one(path)
        files, listening = [SocketFile(path) for _ in range(4)], []
        begin = threading.Barrier(len(files))

        def start(one: SocketFile, begin=begin, listening=listening) -> None:
            begin.wait()
            with contextlib.suppress(NodeUnavailable):
                listening.append((one, one.listen()))

        threads = [threading.Thread(target=start, args=(one,)) for one in files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((winner, sock),) = listening
        assert winner.is_there()
        sock.close()
        winner.remove()


def test_one_that_lost_its_file_leaves_its_successors_alone(file: SocketFile) -> None:
    successor = SocketFile(file.path)
    with file.listen():
        file.path.unlink()
        assert not file.is_there()
        with successor.listen():
            assert not file.is_there()
            file.remove()
            assert successor.is_there()
            successor.remove()


def test_a_folder_that_somebody_keeps_locked(
    file: SocketFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiffin.kvstore.node.server.socket_file._LOCK_S", 0.05)
    other = SocketFile(file.path)
    with (
        other._locked(),
        pytest.raises(NodeUnavailable, match="locked; choose a --socket in a folder of its own"),
    ):
        file.listen()


def test_the_limit_of_a_path_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("n" * SOCKET_PATH_MAX)
    with pytest.raises(InvalidInput, match=f"at most {SOCKET_PATH_MAX} bytes"):
        SocketFile(path).listen()
    with pytest.raises(InvalidInput, match=f"at most {SOCKET_PATH_MAX} bytes"):
        Client.open(f"unix:{path}")


def test_the_longest_path_is_taken(path: Path) -> None:
    long = path.with_name("n" * SOCKET_PATH_MAX)
    file = SocketFile(long)
    with file.listen():
        assert file.is_there()
        file.remove()
