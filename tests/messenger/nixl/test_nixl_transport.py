"""NIXL between two processes: the contract, and a peer that misbehaves."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
from netsupport import StoppedClock
from nixlsupport import Neighbour, ends, neighbour, require_nixl

from tiffin.messenger.errors import (
    FrameError,
    GrantError,
    PeerLost,
    Stalled,
    TransferTimeout,
)
from tiffin.messenger.nixl.agent import METADATA_BYTES_MAX, Description, NixlAgent
from tiffin.messenger.nixl.nixl_transport import NixlTransport
from tiffin.messenger.testing import ServingPeer, TransportContract, eventually, random_bytes, soon
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

require_nixl(__file__)

MIB = 1 << 20
Ends = tuple[NixlAgent, Neighbour]


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Ends]:
    with ends("tcp") as both:
        yield both


@pytest.fixture(scope="module")
def over_memory() -> Iterator[Ends]:
    with ends("all") as both:
        yield both


def transport_of(both: Ends, **options: object) -> NixlTransport:
    agent, other = both
    other.fresh()
    return NixlTransport(agent, other.description, other.resolve, other.confirm, **options)


class TestOverTcp(TransportContract):
    @pytest.fixture
    def peer(self, over_tcp: Ends) -> Iterator[ServingPeer]:
        with closing(transport_of(over_tcp)) as transport:
            yield ServingPeer(transport, over_tcp[1].book, over_tcp[1].allocate)


class TestOverMemory(TransportContract):
    @pytest.fixture
    def peer(self, over_memory: Ends) -> Iterator[ServingPeer]:
        with closing(transport_of(over_memory)) as transport:
            yield ServingPeer(transport, over_memory[1].book, over_memory[1].allocate)


class Reader(threading.Thread):
    """Reads in a thread; `failure` is what it raised."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            # Frames hold arrays of the region, and this thread's frame holds itself.
            self.failure = error.with_traceback(None)


def grant_of(other: Neighbour, nbytes: int) -> int:
    """A grant of so many random bytes, at the region's begin."""
    other.fresh()
    array = other.allocate(nbytes)
    array[:] = random_bytes(nbytes, 3)
    return other.book.add([array])


# -- the grant ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_bytes_of_a_grant_that_ended_meanwhile_are_refused(over_memory: Ends, told: bool) -> None:
    """A one-sided read also sees bytes that were written there after a lease expired."""
    _, other = over_memory
    with closing(transport_of(over_memory)) as transport:
        grant = grant_of(other, 9 * MIB)
        other.held = False
        target = np.zeros(9 * MIB, np.uint8)
        arrivals: list[int] = []
        with pytest.raises(GrantError, match="ended before all its bytes had come"):
            transport.read(
                grant,
                [Range(0, 9 * MIB)],
                [target],
                deadline=soon(),
                arrived=arrivals.append if told else None,
            )
        assert arrivals == []


def test_what_arrived_was_confirmed_after_it_came(over_memory: Ends) -> None:
    """A caller may use each layer when it is reported, so each is confirmed before that."""
    _, other = over_memory
    with closing(transport_of(over_memory)) as transport:
        grant = grant_of(other, 12 * MIB)
        ranges = [Range(at * MIB, MIB) for at in range(12)]
        targets = [np.zeros(MIB, np.uint8) for _ in ranges]
        confirmed_when: list[int] = []

        def arrived(index: int) -> None:
            confirmed_when.append(other.confirmed)
            if index == 3:
                other.held = False  # what comes after the first piece of 4 MiB is not confirmed

        with pytest.raises(GrantError):
            transport.read(grant, ranges, targets, deadline=soon(), arrived=arrived)
        assert confirmed_when == [1, 1, 1, 1]


def test_an_error_of_the_confirming_channel_is_the_callers(over_memory: Ends) -> None:
    agent, other = over_memory

    def confirm(grant: int, *, deadline: float) -> bool:
        raise PeerLost("the channel broke")

    with closing(NixlTransport(agent, other.description, other.resolve, confirm)) as transport:
        grant = grant_of(other, 100)
        with pytest.raises(PeerLost, match="the channel broke"):
            transport.read(grant, [Range(0, 8)], [np.zeros(8, np.uint8)], deadline=soon())


@pytest.mark.parametrize("place", [Range(40 * MIB - 1, 2), Range(-1, 1), Range(2**64, 1)])
def test_a_grant_outside_the_region_is_refused(over_memory: Ends, place: Range) -> None:
    agent, other = over_memory

    def resolve(grant: int) -> list[Range]:
        return [place]

    transport = NixlTransport(agent, other.description, resolve, other.confirm)
    with closing(transport), pytest.raises(GrantError, match="not in the region"):
        transport.read(1, [Range(0, 1)], [np.zeros(1, np.uint8)], deadline=soon())


# -- a peer that hangs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stall_s", "allowed_s", "error"),
    [(0.2, 60.0, Stalled), (60.0, 0.2, TransferTimeout)],
    ids=["stall", "deadline"],
)
def test_a_target_is_the_callers_although_the_transfer_goes_on(
    over_tcp: Ends,
    stall_s: float,
    allowed_s: float,
    error: type[TransferTimeout],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NIXL can't cancel: late bytes go to a staging piece that no other transfer uses."""
    agent, other = over_tcp
    with closing(transport_of(over_tcp, stall_s=stall_s)) as transport:
        grant = grant_of(other, 16 * MIB)
        target = np.zeros(16 * MIB, np.uint8)
        staging = agent.staging()
        other.stop()
        clock = StoppedClock()
        try:
            with monkeypatch.context() as patched:
                # The time starts only when the transfers are under way.
                patched.setattr("tiffin.messenger.nixl.nixl_transport.time", clock)
                patched.setattr("tiffin.messenger.nixl.chunked_call.time", clock)
                deadline = clock.now + allowed_s
                with pytest.raises(error) as raised:
                    transport.read(grant, [Range(0, 16 * MIB)], [target], deadline=deadline)
            assert type(raised.value) is error
            target[:] = 0
            assert staging.quarantined == 2
        finally:
            other.resume()
        assert eventually(lambda: idle(agent))
        assert not target.any()
    with closing(NixlTransport(agent, other.description, other.resolve, other.confirm)) as patient:
        patient.read(grant, [Range(0, 16 * MIB)], [target], deadline=soon())
    assert np.array_equal(target, other.region.array[: 16 * MIB])


def idle(agent: NixlAgent) -> bool:
    """Whether no staging piece is in use or in quarantine."""
    staging = agent.staging()
    staging.check(None, time.monotonic())
    return not staging.quarantined and staging.free == 16


def test_an_error_tells_what_had_arrived(over_tcp: Ends) -> None:
    _, other = over_tcp
    with closing(transport_of(over_tcp, stall_s=1.5)) as transport:
        grant = grant_of(other, 32 * MIB)
        ranges = [Range(at * MIB, MIB) for at in range(32)]
        targets = [np.zeros(MIB, np.uint8) for _ in ranges]
        told: list[int] = []

        def arrived(index: int) -> None:
            told.append(index)
            if index == 0:
                other.stop()

        try:
            with pytest.raises(Stalled) as raised:
                transport.read(grant, ranges, targets, deadline=soon(), arrived=arrived)
        finally:
            other.resume()
        assert 4 <= raised.value.served.ranges == len(told) < 32
        for index in told:
            assert np.array_equal(targets[index], other.region.array[index * MIB :][:MIB])


def test_a_peer_that_hangs_does_not_take_all_pieces() -> None:
    """At most a quarter of the staging is in quarantine for one peer; other peers can be read."""
    small = NixlAgent(lanes="tcp", staging_bytes=4 * MIB, piece_bytes=MIB)
    with (
        closing(small) as agent,
        neighbour("tcp") as hanging,
        neighbour("tcp") as well,
        closing(transport_of((agent, hanging))) as patient,
        closing(transport_of((agent, hanging), stall_s=0.1)) as impatient,
        closing(transport_of((agent, well))) as beside,
    ):
        grant = grant_of(hanging, MIB)
        target = np.zeros(MIB, np.uint8)
        patient.read(grant, [Range(0, MIB)], [target], deadline=soon())
        hanging.stop()
        with pytest.raises(Stalled):
            impatient.read(grant, [Range(0, MIB)], [target], deadline=soon())
        with pytest.raises(PeerLost, match="were given up and have not ended"):
            impatient.read(grant, [Range(0, MIB)], [target], deadline=soon())
        grant = grant_of(well, 8 * MIB)
        large = np.zeros(8 * MIB, np.uint8)
        beside.read(grant, [Range(0, 8 * MIB)], [large], deadline=soon())
        assert np.array_equal(large, well.region.array[: 8 * MIB])


# -- lost peers ------------------------------------------------------------------------------------


def test_a_peer_killed_in_the_middle_is_lost_and_its_successor_is_another() -> None:
    with closing(NixlAgent(lanes="tcp")) as agent:
        target = np.zeros(16 * MIB, np.uint8)
        with neighbour("tcp") as other:
            transport = transport_of((agent, other))
            grant = grant_of(other, 16 * MIB)
            ranges = [Range(0, 16 * MIB)]
            transport.read(grant, ranges, [target], deadline=soon())
            other.stop()
            reader = Reader(lambda: transport.read(grant, ranges, [target], deadline=soon()))
            time.sleep(0.1)
            other.kill()
            reader.join()
            assert isinstance(reader.failure, PeerLost)
            with pytest.raises(PeerLost):
                transport.read(grant, ranges, [target], deadline=soon())
            restarted = Neighbour("tcp", other.region)
            assert restarted.description.metadata != other.description.metadata
            again = transport_of((agent, restarted))
            grant = grant_of(restarted, 16 * MIB)
            target[:] = 0
            again.read(grant, ranges, [target], deadline=soon())
            assert np.array_equal(target, restarted.region.array[: 16 * MIB])
            with pytest.raises(PeerLost):
                transport.read(grant, ranges, [target], deadline=soon())
            transport.close()
            again.close()
            restarted.close()


@pytest.mark.parametrize("what", ["transport", "agent"])
def test_closing_ends_calls_under_way(what: str) -> None:
    with closing(NixlAgent(lanes="tcp")) as agent, neighbour("tcp") as other:
        transport = transport_of((agent, other))
        grant = grant_of(other, 16 * MIB)
        target = np.zeros(16 * MIB, np.uint8)
        ranges = [Range(0, 16 * MIB)]
        transport.read(grant, ranges, [target], deadline=soon())
        other.stop()
        reader = Reader(lambda: transport.read(grant, ranges, [target], deadline=soon()))
        time.sleep(0.1)
        (transport if what == "transport" else agent).close()
        reader.join()
        assert isinstance(reader.failure, PeerLost)
        assert "closed" in str(reader.failure)
        with pytest.raises(PeerLost, match="closed"):
            transport.read(grant, ranges, [target], deadline=soon())
        transport.close()


@pytest.mark.parametrize(
    "metadata", [b"", b"garbage" * 20, bytes(METADATA_BYTES_MAX + 1)], ids=["none", "other", "long"]
)
def test_what_is_not_metadata_is_refused(over_memory: Ends, metadata: bytes) -> None:
    agent, other = over_memory
    grant = grant_of(other, 100)
    wrong = other.description._replace(metadata=metadata)

    def connect_and_read() -> None:
        transport = NixlTransport(agent, wrong, other.resolve, other.confirm)
        transport.read(grant, [Range(0, 8)], [np.zeros(8, np.uint8)], deadline=soon())

    with pytest.raises(FrameError):
        connect_and_read()


@pytest.mark.parametrize("base", [-1, 2**63 - 1, 2**70])
def test_addresses_that_no_machine_has_are_refused(over_memory: Ends, base: int) -> None:
    agent, other = over_memory
    wrong = Description(other.description.metadata, base, other.description.nbytes)
    with pytest.raises(FrameError, match="no machine has"):
        NixlTransport(agent, wrong, other.resolve, other.confirm)


def test_memory_that_the_peer_has_not_registered_is_not_read(over_memory: Ends) -> None:
    agent, other = over_memory
    grant = grant_of(other, 4096)
    beyond = other.description._replace(base_address=other.description.base_address + 40 * MIB)
    transport = NixlTransport(agent, beyond, other.resolve, other.confirm)
    with closing(transport), pytest.raises(PeerLost, match="refused"):
        transport.read(grant, [Range(0, 8)], [np.zeros(8, np.uint8)], deadline=soon())
