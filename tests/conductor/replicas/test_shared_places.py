"""Several conductors hold requests for one instance: each sends its share ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharingsupport import Board, conductor, request, spec

from tiffin.conductor.records import Load, RequestEvent

if TYPE_CHECKING:
    from tiffin.conductor.replicas.replica import SharedConductor

AHEAD_MAX = 4


def pair() -> tuple[Board, list[SharedConductor]]:
    queue = {"ahead_max": AHEAD_MAX, "ahead_s": 0.0}
    cores = [conductor(name, queue=queue) for name in ("a", "b")]
    for core in cores:
        core.register(spec("i0"), 0.0)
        core.heartbeat("i0", Load(), 0.0)
    return Board(), cores


def exchange(board: Board, cores: list[SharedConductor], now: float) -> None:
    for core in cores:
        board.write(core, now)
    for core in cores:
        board.read(core, now)
        core.tick(now)


def ahead(core: SharedConductor) -> int:
    return core.dispatch.ahead(core.cluster.row("i0"))


def released(core: SharedConductor) -> list[str]:
    names = [flight.request.id for flight in core.ledger if flight.phase == 0]
    return [name for name in names if not core.dispatch.holds(name)]


def done(core: SharedConductor, name: str, now: float) -> None:
    core.observe(RequestEvent(name, "finished"), now)


def test_two_with_as_many_requests_have_half_of_the_places_each() -> None:
    board, (a, b) = pair()
    for number in range(12):
        a.schedule(request(f"a{number}"), 0.0)
        b.schedule(request(f"b{number}"), 0.0)
        exchange(board, [a, b], 0.0)
    assert ahead(a) + ahead(b) <= AHEAD_MAX + 2
    for _ in range(4):  # what was ahead before they knew of each other ends
        for core in (a, b):
            done(core, released(core)[0], 0.0)
            exchange(board, [a, b], 0.0)
    assert (ahead(a), ahead(b)) == (2, 2)


def test_one_has_all_places_where_the_other_has_nothing() -> None:
    board, (a, b) = pair()
    for number in range(12):
        a.schedule(request(f"a{number}"), 0.0)
    b.schedule(request("b"), 0.0)
    exchange(board, [a, b], 0.0)
    assert (ahead(a), ahead(b)) == (AHEAD_MAX, 1), "one more than the limit: each has a place"
    done(b, "b", 0.1)
    exchange(board, [a, b], 0.1)
    assert ahead(a) == AHEAD_MAX


def test_the_places_of_one_that_has_died_are_free() -> None:
    board, (a, b) = pair()
    for number in range(12):
        b.schedule(request(f"b{number}"), 0.0)
    exchange(board, [a, b], 0.0)
    for number in range(4):
        a.schedule(request(f"a{number}"), 0.0)
    assert released(a) == ["a0"]
    board.read(a, 2.1)  # b's state has expired
    a.dispatch.tick(0.0)
    assert released(a) == ["a0", "a1", "a2", "a3"]
