"""The pool's memory is pinned once blocks are copied, and until the copier is closed. On device
`cpu` a registration is only noted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from gpusupport import GpuRank, blocks
from kvsupport import wait_until

from tiffin.kvstore.connectors.vllm.pages import pool_pinning
from tiffin.kvstore.connectors.vllm.pages.pool_pinning import PoolPinning
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.messenger.gpu.pinning import registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

URL = "embedded:?dram=16MiB&prefault=false"


def at_once(action: Callable[[], None]) -> bool:
    action()
    return True


@pytest.fixture
def link() -> Iterator[PoolLink]:
    link = PoolLink.shared(URL, "always")
    link.call(lambda client: None, wait_s=30)
    yield link
    link.close()


def pinned(link: PoolLink) -> bool:
    def is_pinned(client: Any) -> bool:
        near = client.near_link
        assert near is not None
        memories = near.mapping.all
        return any(registration(memory.ctypes.data, 1, "cpu") for memory in memories)

    return link.call(is_pinned)


def test_memory_is_pinned_from_the_first_copy_to_the_end(link: PoolLink) -> None:
    """Not before: the engine captures CUDA graphs then, beside which nothing may be registered."""
    rank = GpuRank()
    rank.copier.warm_up()
    rank.copier.pin(link)
    assert not pinned(link)
    rank.copier.gather(blocks(1), [0, 1, 2, 3])
    wait_until(lambda: pinned(link), "the memory is pinned")
    rank.copier.close()
    assert not pinned(link)
    rank.copier.gather(blocks(1), [0, 1, 2, 3])  # closed: a copy pins nothing more
    assert not pinned(link)


def test_nothing_is_unpinned_under_a_copy() -> None:
    rank = GpuRank()
    ran: list[int] = []
    with rank.copier._stage():
        assert not rank.copier.while_idle(lambda: ran.append(1))
    assert not ran
    assert rank.copier.while_idle(lambda: ran.append(1))
    assert ran == [1]


def test_a_pool_that_is_not_there_is_tried_again(
    link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_pinning, "PERIOD_S", 0.0)

    class FailingLink:
        """Fails at first."""

        calls = 0

        def call(self, action: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise NodeUnavailable("none")
            return link.call(action)

    failing = FailingLink()
    pinning = PoolPinning(failing, "cpu", at_once)  # type: ignore[arg-type]

    def is_pinned() -> bool:
        pinning.follow_soon()
        return pinned(link)

    wait_until(is_pinned, "the memory is pinned")
    assert failing.calls > 1
    pinning.close()
    assert not pinned(link)


def test_it_is_not_asked_in_every_copy(link: PoolLink) -> None:
    pinning = PoolPinning(link, "cpu", at_once)
    pinning.follow_soon()
    first = pinning._thread
    assert first is not None
    first.join(30)
    pinning.follow_soon()
    assert pinning._thread is first
    pinning.close()
