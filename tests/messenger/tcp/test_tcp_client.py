"""Streams and their pool: what is sent together, what survives an error, what is reused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import HELLO, serving
from tcpsupport import Relay

from tiffin.messenger.errors import (
    FrameError,
    GrantError,
    MessengerError,
    PeerLost,
    RangeError,
    Stalled,
    TransferTimeout,
)
from tiffin.messenger.tcp import tcp_client
from tiffin.messenger.tcp.tcp_client import LAST_GRANT, TcpTransport, connect
from tiffin.messenger.testing import eventually, random_bytes, soon
from tiffin.messenger.transport import Range, Served
from tiffin.messenger.wire import frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from netsupport import Server

    from tiffin.messenger.tcp.stream import Stream

TEN = [Range(0, 10)]


@pytest.fixture
def stream(server: Server) -> Iterator[Stream]:
    with closing(server.opener()(soon())) as stream:
        yield stream


def ten() -> list[np.ndarray]:
    return [np.zeros(10, np.uint8)]


# -- a stream --------------------------------------------------------------------------------------


def test_messages_are_answered_in_order(stream: Stream) -> None:
    for number in range(100):
        stream.message(b"%d" % number)
    stream.flush(soon())
    assert [stream.receive_message(soon()) for _ in range(100)] == [b"%d" % n for n in range(100)]
    assert stream.idle


@pytest.mark.parametrize("nbytes", [0, 1, 4091, 4092, 4096, 65_536, 3 << 20])
def test_messages_of_all_sizes(stream: Stream, nbytes: int) -> None:
    body = random_bytes(nbytes, 1).tobytes()
    for _ in range(2):
        stream.message(body)
        stream.message(b"after")
        stream.flush(soon())
        assert stream.receive_message(soon()) == body
        assert stream.receive_message(soon()) == b"after"


def test_who_yields_a_busy_core_does_not_look_again_and_again(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred polls take 0.1 ms; where each yields a busy core to another process, they would
    take longer than the call may."""
    yields = []

    def busy() -> None:  # for the server's threads too
        yields.append(threading.current_thread())
        time.sleep(0.005)

    monkeypatch.setattr(os, "sched_yield", busy)
    with pytest.raises(TransferTimeout):
        stream.receive_message(time.monotonic() + 0.01)
    assert yields.count(threading.current_thread()) == 1


def test_a_lease_and_its_bytes_in_one_round_trip(server: Server, stream: Stream) -> None:
    """The READ is for the grant that the message before it was answered with, whatever number
    that has; a message that is not answered takes no place among the answers."""
    contents = [random_bytes(200_000, seed) for seed in range(3)]
    grants = [server.book.add([content]) for content in contents]
    targets = [np.zeros(200_000, np.uint8) for _ in contents]
    for grant in grants:
        stream.message(b"grant %d" % grant)
        stream.ask_read(LAST_GRANT, [Range(0, 200_000)])
        stream.message(b"quiet")
    stream.flush(soon())
    for target, content in zip(targets, contents, strict=True):
        assert stream.receive_message(soon()) == b"granted"
        served = stream.receive_data([Range(0, 200_000)], [target], soon())
        assert served == Served(1, 200_000)
        assert np.array_equal(target, content)
    assert stream.idle
    assert eventually(lambda: server.messages.count(b"quiet") == 3)


def test_a_write_to_the_last_grant_and_its_commit_in_one_round_trip(
    server: Server, stream: Stream
) -> None:
    memory = np.zeros(100_000, np.uint8)
    grant = server.book.add([memory], writes=True)
    source = random_bytes(100_000, 3)
    stream.message(b"grant %d" % grant)
    stream.ask_write(LAST_GRANT, [Range(0, 100_000)], [source])
    stream.message(b"commit")
    stream.flush(soon())
    assert stream.receive_message(soon()) == b"granted"
    assert stream.receive_written(soon()) == Served(1, 100_000)
    assert stream.receive_message(soon()) == b"commit"
    assert np.array_equal(memory, source)


def test_the_last_grant_is_of_the_last_message(server: Server, stream: Stream) -> None:
    grant = server.book.add([np.ones(10, np.uint8)], writes=True)
    stream.ask_read(LAST_GRANT, TEN)
    stream.message(b"grant %d" % grant)
    stream.message(b"something else")
    stream.ask_read(LAST_GRANT, TEN)
    stream.flush(soon())
    with pytest.raises(GrantError, match="not answered with a grant"):
        stream.receive_data(TEN, ten(), soon())
    stream.receive_message(soon())
    stream.receive_message(soon())
    with pytest.raises(GrantError, match="not answered with a grant"):
        stream.receive_data(TEN, ten(), soon())
    stream.ask_write(LAST_GRANT, TEN, ten())
    stream.flush(soon())
    with pytest.raises(GrantError, match="not answered with a grant"):
        stream.receive_written(soon())
    assert stream.idle


def test_a_stream_lives_on_after_refusals(server: Server, stream: Stream) -> None:
    """Also after a refused write, whose bytes had been sent already."""
    memory = np.zeros(1 << 20, np.uint8)
    grant = server.book.add([memory], writes=True)
    big = np.ones(3 << 20, np.uint8)
    everything = [Range(0, len(big))]
    for _ in range(3):
        stream.ask_write(grant + 1, everything, [big])
        stream.ask_write(grant, everything, [big])
        stream.ask_write(grant, TEN, [big[:10]])
        stream.message(b"still here")
        stream.flush(soon())
        with pytest.raises(GrantError, match="no grant"):
            stream.receive_written(soon())
        assert stream.receive_written(soon()) == Served(0, 0)
        assert stream.receive_written(soon()) == Served(1, 10)
        assert stream.receive_message(soon()) == b"still here"
    assert memory.sum() == 10
    assert stream.idle


def test_more_than_is_worth_draining_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, server: Server, stream: Stream
) -> None:
    monkeypatch.setattr("tiffin.messenger.tcp.listener._DRAIN_BYTES_MAX", 1 << 20)
    big = np.zeros((1 << 20) + 1, np.uint8)
    stream.ask_write(99, [Range(0, 1 << 20)], [big[:-1]])
    stream.flush(soon())
    with pytest.raises(GrantError):
        stream.receive_written(soon())
    stream.ask_write(99, [Range(0, len(big))], [big])
    with pytest.raises(PeerLost):
        _finish_write(stream)
    assert not stream.idle


def _finish_write(stream: Stream) -> Served:
    stream.flush(soon())
    return stream.receive_written(soon())


def test_a_write_behind_an_unanswered_read_is_a_mistake(server: Server, stream: Stream) -> None:
    """Both ends would send, and neither would receive."""
    grant = server.book.add([np.zeros(10, np.uint8)], writes=True)
    stream.ask_read(grant, TEN)
    with pytest.raises(MessengerError, match="receive the data"):
        stream.ask_write(grant, TEN, ten())
    stream.flush(soon())
    stream.receive_data(TEN, ten(), soon())
    stream.ask_write(grant, TEN, ten())
    stream.flush(soon())
    assert stream.receive_written(soon()) == Served(1, 10)


def test_arrivals_are_told_while_bytes_still_come(server: Server, stream: Stream) -> None:
    content = random_bytes(20 << 20, 1)
    grant = server.book.add([content])
    ranges = [Range(at, 1 << 20) for at in range(0, 20 << 20, 1 << 20)]
    target = np.zeros(20 << 20, np.uint8)
    targets = [target[at : at + (1 << 20)] for at, _ in ranges]
    complete: list[bool] = []
    last = target[-1]
    seen_early: list[bool] = []

    def arrived(index: int) -> None:
        at, length = ranges[index]
        complete.append(np.array_equal(target[at : at + length], content[at : at + length]))
        seen_early.append(not target[-(1 << 20) :].any())

    stream.ask_read(grant, ranges)
    stream.flush(soon())
    stream.receive_data(ranges, targets, soon(), arrived)
    assert complete == [True] * 20
    assert seen_early[0], "the first was told before the last came"
    assert last == 0


def test_bad_targets_are_noticed_before_anything_is_received(
    server: Server, stream: Stream
) -> None:
    grant = server.book.add([np.ones(10, np.uint8)])
    stream.ask_read(grant, TEN)
    stream.flush(soon())
    with pytest.raises(RangeError):
        stream.receive_data(TEN, [np.zeros(9, np.uint8)], soon())
    target = ten()
    stream.receive_data(TEN, target, soon())
    assert target[0].all()


def test_an_answer_of_the_wrong_kind(stream: Stream) -> None:
    stream.message(b"hello")
    stream.flush(soon())
    with pytest.raises(FrameError, match="MESSAGE frame instead of DATA"):
        stream.receive_data(TEN, ten(), soon())
    assert not stream.idle


def test_an_answer_that_does_not_fit_the_question(server: Server, stream: Stream) -> None:
    grant = server.book.add([np.zeros(1000, np.uint8)])
    stream.ask_read(grant, [Range(0, 20)])
    stream.flush(soon())
    with pytest.raises(FrameError, match="data of"):
        stream.receive_data(TEN, ten(), soon())
    assert not stream.idle


def test_cut_wakes_who_waits(stream: Stream) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            stream.receive_message(soon())
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    stream.cut()
    thread.join(10)
    assert len(errors) == 1
    assert "cut" in str(errors[0])
    assert not stream.idle
    stream.close()
    stream.cut()
    stream.message(b"x")
    with pytest.raises(PeerLost):
        stream.flush(soon())


def test_deadlines_and_stalls(server: Server, stream: Stream) -> None:
    with pytest.raises(TransferTimeout) as late:
        stream.receive_message(soon(0.05))
    assert not isinstance(late.value, Stalled)
    with closing(server.opener()(soon())) as other:
        other._reads_due = 1
        with pytest.raises(Stalled):
            other.receive_data(TEN, ten(), soon(), stall_s=0.05)


def test_half_of_the_bytes_and_then_silence() -> None:
    """The error says what had come, in whole ranges."""
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, closing(connect(listening.getsockname(), soon())) as stream:
        peer, _ = listening.accept()
        with peer:
            ranges = [Range(0, 10), Range(10, 10), Range(20, 10)]
            targets = [np.zeros(10, np.uint8) for _ in ranges]
            stream.ask_read(1, ranges)
            stream.flush(soon())
            answer = frames.answer(frames.Kind.DATA, Served(3, 30))
            peer.sendall(answer + b"a" * 25)
            with pytest.raises(Stalled) as stalled:
                stream.receive_data(ranges, targets, soon(), stall_s=0.1)
            assert stalled.value.served == Served(2, 20)
            assert not stream.idle


# -- connecting ------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(PeerLost, match="refused"):
        connect(address, soon())


def test_no_answer_to_the_connection() -> None:
    """A full backlog does not answer, like a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with pytest.raises(TransferTimeout):
            connect(full.getsockname(), soon(0.1))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70, "127.0.0.1"])
def test_addresses_that_do_not_exist(host: str) -> None:
    with pytest.raises(PeerLost, match="no connection to"):
        connect((host, 1 if host[0].isalpha() else 70_000), soon())


def test_ipv6() -> None:
    with serving(trusting=True, greeting=None) as server:
        assert server.address[0] == "127.0.0.1"
    listener = tcp_client.Listener(("::1", 0), _refuse)
    with closing(listener):
        connect(listener.address, soon()).close()


def _refuse(peer: str) -> tcp_client.Conversation:
    raise FrameError(f"nobody talks to {peer}")


# -- the pool --------------------------------------------------------------------------------------


def test_a_clean_stream_is_used_again(server: Server, transport: TcpTransport) -> None:
    with transport.stream(soon()) as first:
        first.message(b"hello")
        first.flush(soon())
        first.receive_message(soon())
    with transport.stream(soon()) as second:
        assert second is first
    assert len(server.talks) == 1


def test_streams_that_are_not_clean_are_closed(server: Server, transport: TcpTransport) -> None:
    grant = server.book.add([np.zeros(10, np.uint8)])
    with transport.stream(soon()) as queued:
        queued.message(b"never flushed")
    with transport.stream(soon()) as due:
        due.ask_read(grant, TEN)
        due.flush(soon())
    with transport.stream(soon()) as unread:
        unread.message(b"1")
        unread.flush(soon())
        assert eventually(lambda: not unread.alive()), "its answer has not come"
    with pytest.raises(KeyError), transport.stream(soon()) as failed:
        raise KeyError
    with transport.stream(soon()) as good:
        good.message(b"fine")
        good.flush(soon())
        assert good.receive_message(soon()) == b"fine"
    assert len({queued, due, unread, failed, good}) == 5


def test_a_refused_grant_costs_no_connection(server: Server, transport: TcpTransport) -> None:
    for _ in range(3):
        with pytest.raises(GrantError):
            transport.read(77, TEN, ten(), deadline=soon())
    assert len(server.talks) == 1


def test_the_last_grant_is_not_of_a_transport(server: Server, transport: TcpTransport) -> None:
    """Any stream of the pool may be used, whose last grant may be another caller's."""
    grant = server.book.add([np.ones(10, np.uint8)])
    with transport.stream(soon()) as stream:
        stream.message(b"grant %d" % grant)
        stream.flush(soon())
        stream.receive_message(soon())
    with pytest.raises(GrantError, match="of one stream"):
        transport.read(LAST_GRANT, TEN, ten(), deadline=soon())


def test_a_restarted_peer_is_found_again(transport: TcpTransport, server: Server) -> None:
    """Idle streams whose peer is gone are noticed before they are used."""
    grant = server.book.add([np.ones(10, np.uint8)])
    target = ten()
    transport.read(grant, TEN, target, deadline=soon())
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(transport.stream(soon()))
    for talk in list(server.listener._trusted):
        talk.cut()
    assert eventually(lambda: not server.listener.statistics()["trusted"])
    assert transport.read(grant, TEN, target, deadline=soon()) == Served(1, 10)


def test_who_needs_one_stream_too_many_waits(server: Server) -> None:
    with closing(TcpTransport(server.opener(), streams_max=2)) as transport:
        with transport.stream(soon()) as one, transport.stream(soon()) as two:
            assert one is not two
            with (
                pytest.raises(TransferTimeout, match="all 2 streams"),
                transport.stream(soon(0.02)),
            ):
                pytest.fail("a third stream")
            got: list[Stream] = []

            def wait() -> None:
                with transport.stream(soon()) as third:
                    got.append(third)

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.02)
            assert not got
        thread.join()
        assert got[0] in (one, two)


def test_an_opener_that_fails_takes_no_place(server: Server) -> None:
    fails = True

    def opener(deadline: float) -> Stream:
        if fails:
            raise PeerLost("not today")
        return server.opener()(deadline)

    with closing(TcpTransport(opener, streams_max=1)) as transport:
        for _ in range(3):
            with pytest.raises(PeerLost, match="not today"):
                transport.read(1, TEN, ten(), deadline=soon())
        fails = False
        grant = server.book.add([np.zeros(10, np.uint8)])
        assert transport.read(grant, TEN, ten(), deadline=soon()).ranges == 1


def test_cold_streams_are_closed(
    monkeypatch: pytest.MonkeyPatch, server: Server, transport: TcpTransport
) -> None:
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(transport.stream(soon()))
    monkeypatch.setattr("tiffin.messenger.tcp.stream_pool._IDLE_S_MAX", 0.05)
    time.sleep(0.1)
    with transport.stream(soon()):
        pass
    assert eventually(lambda: server.listener.statistics()["trusted"] == 1)


def test_cut_ends_calls_and_the_next_one_connects_again(
    server: Server, transport: TcpTransport
) -> None:
    errors: list[PeerLost] = []

    def wait() -> None:
        try:
            with transport.stream(soon()) as stream:
                stream.receive_message(soon())
        except PeerLost as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(server.talks) == 3 and server.listener.statistics()["trusted"])
    time.sleep(0.05)
    transport.cut()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    grant = server.book.add([np.zeros(10, np.uint8)])
    assert transport.read(grant, TEN, ten(), deadline=soon()).ranges == 1


def test_close_ends_calls(server: Server, transport: TcpTransport) -> None:
    done: list[str] = []

    def wait() -> None:
        try:
            with transport.stream(soon()) as stream:
                stream.receive_message(soon())
        except PeerLost:
            done.append("lost")

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: len(server.talks) == 1)
    time.sleep(0.05)
    transport.close()
    thread.join()
    assert done == ["lost"]
    with pytest.raises(PeerLost, match="closed"), transport.stream(soon()):
        pytest.fail("a stream of a closed transport")


def test_parts_fail_together(server: Server) -> None:
    """A refusal of one part ends the other parts, and no target is written afterwards."""
    nbytes = 32 << 20
    parts = threading.Barrier(4)

    def opener(deadline: float) -> Stream:
        if not server.talks:
            parts.wait(30)
        return server.opener()(deadline)

    with closing(TcpTransport(opener, parallel_max=4, streams_max=4)) as transport:
        grant = server.book.add([np.ones(nbytes, np.uint8)])
        target = np.zeros(nbytes, np.uint8)
        ranges, targets = [Range(0, nbytes)], [target]
        assert transport.read(grant, ranges, targets, deadline=soon()) == Served(1, nbytes)
        assert len(server.talks) == 4
        with pytest.raises(GrantError):
            transport.read(grant + 1, ranges, targets, deadline=soon())
        with pytest.raises(TransferTimeout):
            transport.read(grant, ranges, targets, deadline=soon(2e-3))
        target[:] = 0
        time.sleep(0.05)
        assert not target.any()
        assert transport.read(grant, ranges, targets, deadline=soon()) == Served(1, nbytes)
        assert target.all()


def interrupt_once_it_receives(thread: int) -> None:
    """SIGUSR1 to a thread that waits for bytes."""

    def receives() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[thread])
        return any(frame.f_code.co_name == "_patiently" for frame, _ in stack)

    if eventually(receives):
        signal.pthread_kill(thread, signal.SIGUSR1)


@pytest.mark.parametrize("parallel_max", [1, 3])
def test_ctrl_c_in_the_middle(server: Server, parallel_max: int) -> None:
    """It is raised only when no thread writes to the target any more."""
    nbytes = 32 << 20
    grant = server.book.add([np.ones(nbytes, np.uint8)])
    target = np.zeros(nbytes, np.uint8)
    main = threading.get_ident()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with closing(Relay(server.address)) as relay:
            transport = TcpTransport(server.opener(relay.address), parallel_max=parallel_max)
            with closing(transport):
                transport.read(grant, [Range(0, nbytes)], [target], deadline=soon())
                relay.pause()
                thread = threading.Thread(target=interrupt_once_it_receives, args=(main,))
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    transport.read(grant, [Range(0, nbytes)], [target], deadline=soon())
                thread.join()
                target[:] = 0
                relay.resume()
                time.sleep(0.05)
                assert not target.any()
                transport.read(grant, [Range(0, nbytes)], [target], deadline=soon())
                assert target.all()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_transport_closed_while_it_connects(server: Server) -> None:
    opening, go_on = threading.Event(), threading.Event()
    errors: list[PeerLost] = []

    def opener(deadline: float) -> Stream:
        opening.set()
        go_on.wait()
        return server.opener()(deadline)

    transport = TcpTransport(opener)

    def read() -> None:
        try:
            transport.read(1, TEN, ten(), deadline=soon())
        except PeerLost as error:
            errors.append(error)

    reader, closer = threading.Thread(target=read), threading.Thread(target=transport.close)
    reader.start()
    opening.wait()
    closer.start()
    assert eventually(lambda: transport._pool._closed)
    go_on.set()
    reader.join()
    closer.join()
    assert len(errors) == 1


def test_a_forked_child_uses_none_of_the_parents_connections() -> None:
    """Both would read from one stream, and each get half of the answers."""
    code = """
import os, sys, time
sys.path[:0] = sys.argv[1:]
from netsupport import serving
from tiffin.messenger.testing import soon
from tiffin.messenger.tcp.tcp_client import TcpTransport
import numpy as np
from tiffin.messenger.transport import Range
with serving() as server:
    grant = server.book.add([np.ones(10, np.uint8)])
    transport = TcpTransport(server.opener())
    target = np.zeros(10, np.uint8)
    def read():
        transport.read(grant, [Range(0, 10)], [target], deadline=soon())
    read()
    child = os.fork()
    if not child:
        assert transport._pool.counts() == (0, 0)
        try:
            read()                 # connects by itself; the parent serves it
            os._exit(7)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    read()
    assert len(server.talks) == 2, server.talks
    transport.close()
sys.exit(status)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, os.path.dirname(os.path.dirname(__file__))],
        timeout=60,
        check=False,
    )
    assert done.returncode == 7


def test_hello_is_only_said_once_per_stream(server: Server, transport: TcpTransport) -> None:
    grant = server.book.add([np.zeros(10, np.uint8)])
    for _ in range(5):
        transport.read(grant, TEN, ten(), deadline=soon())
    assert server.messages == [HELLO]
