"""A worker's saves by layer, in an embedded node: prompts of three blocks of four pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from kvsupport import Background, fresh_prefix, is_quiet, wait_until
from layersupport import LayeredWorker
from pagesupport import BLOCK_PAGES, LAYERS, schema_of
from test_worker_side import BLOCKS, OTHERS, PAGES, Gate, GatedLink, hit

from tiffin.kvstore.connectors.vllm.orders import StepOrders
from tiffin.kvstore.errors import NodeUnavailable, StaleLease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Client, Prefix


@pytest.fixture
def worker(link: GatedLink, client: Client) -> Iterator[LayeredWorker]:
    one = LayeredWorker(link)
    yield one
    one.side.close()
    wait_until(lambda: is_quiet(client.statistics()), "no reservation is left")


def assert_loadable(worker: LayeredWorker, prefix: Prefix) -> None:
    """The pool has what is in the pages."""
    right = worker.contents(PAGES)
    worker.load(prefix)
    assert worker.contents(OTHERS) == right


def test_layers_are_read_while_the_next_are_computed(
    worker: LayeredWorker, client: Client, prefix: Prefix
) -> None:
    worker.begin_step(prefix)
    worker.settle()
    with client.stream(prefix) as stream:
        layers = iter(stream)
        for index in range(LAYERS):
            worker.pages.layers[index] += 1  # the step computes it
            worker.compute(index)
            layer = next(layers)
            assert (layer.index, len(layer.blocks)) == (index, BLOCKS)
            assert worker.is_right(layer)
        worker.end_step()
        assert client.match(prefix).blocks == 0, "nothing is confirmed yet"
        worker.confirm(1)
        assert next(layers, None) is None
    assert client.match(prefix).blocks == BLOCKS
    worker.saved()
    assert_loadable(worker, prefix)


def test_a_late_thread_publishes_behind_the_step(
    worker: LayeredWorker, link: GatedLink, client: Client, prefix: Prefix
) -> None:
    link.before = gate = Gate()
    worker.begin_step(prefix)
    worker.compute(*range(LAYERS))
    worker.end_step()
    link.before = lambda: None
    gate.opened.set()
    worker.confirm(1)
    worker.saved()
    assert client.match(prefix).blocks == BLOCKS


def test_what_is_confirmed_before_it_was_reserved_is_saved_whole(
    worker: LayeredWorker, client: Client, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, layers = Gate(), list[int]()
    monkeypatch.setattr(worker.pages.copier, "gather_layer", lambda layer, *_: layers.append(layer))
    worker.side._layer_saves._publisher.submit(gate)
    worker.begin_step(prefix)
    worker.compute(*range(LAYERS))
    worker.end_step()
    worker.confirm(1)
    gate.opened.set()
    worker.saved()
    assert layers == []
    assert client.match(prefix).blocks == BLOCKS
    assert_loadable(worker, prefix)


def test_layers_whose_hooks_were_not_called_are_published_at_the_end(
    worker: LayeredWorker, client: Client, prefix: Prefix
) -> None:
    worker.begin_step(prefix)
    worker.compute(0)
    worker.end_step()
    worker.compute(1)  # of a step without saves
    worker.confirm(1)
    worker.saved()
    assert client.match(prefix).blocks == BLOCKS


@pytest.mark.parametrize("computed", range(LAYERS + 1))
def test_what_is_given_up_is_never_stored_and_its_readers_learn_it(
    worker: LayeredWorker, client: Client, prefix: Prefix, computed: int
) -> None:
    worker.begin_step(prefix)
    worker.settle()
    with client.stream(prefix) as stream:
        layers = iter(stream)
        for index in range(computed):
            worker.compute(index)
            next(layers)
        worker.give_up(1)
        with pytest.raises(StaleLease, match="given up"):
            next(layers)
    worker.saved()
    assert client.exists(prefix) == [False] * BLOCKS


@pytest.mark.parametrize("preempted", [False, True])
def test_pages_are_not_read_any_more_once_they_are_drained(
    worker: LayeredWorker,
    client: Client,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    preempted: bool,
) -> None:
    copy, gate = worker.pages.copier.gather_layer, Gate()
    copied = []

    def gather_layer(layer: int, *arguments: Any) -> None:
        gate()
        copied.append(layer)
        copy(layer, *arguments)

    monkeypatch.setattr(worker.pages.copier, "gather_layer", gather_layer)
    worker.begin_step(prefix)
    worker.compute(*range(LAYERS))
    assert gate.reached.wait(30)
    drain = partial(worker.side.drain, ["r"]) if preempted else partial(worker.give_up, 1)
    draining = Background(drain)
    gate.opened.set()
    draining.result()
    assert copied == [0]
    if preempted:
        worker.confirm(1)
    worker.saved()
    assert copied == [0]
    assert client.exists(prefix) == [False] * BLOCKS


@pytest.mark.parametrize("call", range(LAYERS + 2))
def test_what_can_not_be_reserved_or_published_is_saved_whole(
    worker: LayeredWorker, link: GatedLink, client: Client, prefix: Prefix, call: int
) -> None:
    """One call of the pool fails: the reserve, a publish, or the commit."""
    calls = iter(range(100))

    def fail() -> None:
        if next(calls) == call:
            raise NodeUnavailable("not now")

    link.before = fail
    worker.begin_step(prefix)
    worker.compute(*range(LAYERS))
    worker.end_step()
    worker.settle()
    assert client.exists(prefix) == [False] * BLOCKS
    worker.confirm(1)
    worker.saved()
    assert client.match(prefix).blocks == BLOCKS
    assert_loadable(worker, prefix)


def test_what_others_have_is_not_written_again(
    worker: LayeredWorker, client: Client, prefix: Prefix
) -> None:
    worker.save(prefix[:1], number=7, pages=PAGES[:BLOCK_PAGES])
    worker.saved(7)
    with client.reserve(prefix[1:2]) as busy:
        worker.begin_step(prefix)
        worker.compute(*range(LAYERS))
        worker.end_step()
        worker.confirm(1)
        worker.saved()
        assert client.exists(prefix) == [True, False, True]
        busy.abort()


def test_a_block_is_there_once_all_ranks_have_published_and_stored_it(
    link: GatedLink, client: Client
) -> None:
    prefix = fresh_prefix(BLOCKS, schema_of(2))
    workers = [LayeredWorker(link, rank, 2) for rank in range(2)]
    for worker in workers:
        worker.begin_step(prefix)
    for worker in workers:
        worker.settle()
    with client.stream(prefix) as stream:
        layers = iter(stream)
        for index in range(LAYERS):
            for worker in workers:
                worker.compute(index)
            assert next(layers).index == index
        workers[0].confirm(1)
        workers[0].saved()
        assert hit(link, prefix) == 0
        workers[1].confirm(1)
        assert next(layers, None) is None
    assert hit(link, prefix) == BLOCKS
    for worker in workers:
        worker.side.close()


def test_an_engine_that_ends_leaves_nothing_unconfirmed(
    link: GatedLink, client: Client, prefix: Prefix
) -> None:
    worker = LayeredWorker(link)
    worker.begin_step(prefix)
    worker.compute(0)
    worker.side.close()
    assert client.exists(prefix) == [False] * BLOCKS
    wait_until(lambda: is_quiet(client.statistics()), "no reservation is left")


def test_pages_of_a_finished_request_are_kept_until_its_saves_end(
    worker: LayeredWorker, prefix: Prefix
) -> None:
    worker.begin_step(prefix)
    worker.compute(*range(LAYERS))
    worker.end_step()
    worker.side.begin(StepOrders(finished=["r"]))
    assert worker.side.ended() == (set(), set())
    worker.give_up(1)
    wait_until(lambda: worker.side.ended()[0] == {"r"}, "the pages are freed")
    assert worker.side.take_report().ended_saves == {1: 1}
