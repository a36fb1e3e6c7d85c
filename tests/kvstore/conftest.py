"""Pools and daemons for the store's tests; daemons start once, and every test finds them empty."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from certsupport import make_authority
from kvsupport import NVME_BLOCKS, SLACK_S, Daemon, LoopThread, PoolOptions
from waysupport import FAST_WAYS, WAYS, Host, NetworkNode, Pool, TwoNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from certsupport import Authority

    from tiffin.kvstore.node.node import Node


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            way = item.callspec.params.get("way")
            if way in WAYS and way not in FAST_WAYS:
                item.add_marker("slow")


@pytest.fixture(scope="session")
def commands_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the metadata by which `command_environment` makes the commands known."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="session")
def shared_daemon(commands_folder: Path) -> Iterator[Callable[[PoolOptions], Daemon]]:
    """One daemon per set of options, for as long as the tests run."""
    daemons: dict[PoolOptions, Daemon] = {}

    def daemon(options: PoolOptions) -> Daemon:
        found = daemons.get(options)
        if found is None or not found.alive():
            found = daemons[options] = options.start_daemon(commands_folder)
        return found

    yield daemon
    for one in daemons.values():
        one.close()


@pytest.fixture
def own_daemon(commands_folder: Path) -> Iterator[Callable[..., Daemon]]:
    """Daemons for tests that kill them."""
    with contextlib.ExitStack() as stack:

        def daemon(**keywords: Any) -> Daemon:
            started = Daemon(commands_folder, **keywords)
            stack.callback(started.close)
            return started

        yield daemon


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of a pool's certificates."""
    return make_authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority."""
    return make_authority(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pool(
    shared_daemon: Callable[[PoolOptions], Daemon], loop_thread: LoopThread, tmp_path: Path
) -> Iterator[Callable[[str, PoolOptions], Pool]]:
    """A function that opens pools; at the end each must be at rest and whole, and is emptied."""
    pools: list[Pool] = []
    with contextlib.ExitStack() as nodes:

        def make(way: str, options: PoolOptions) -> Pool:
            pools.append(Pool(way, host(way, options), options, loop_thread))
            return pools[-1]

        def host(way: str, options: PoolOptions) -> Host:
            folder = tmp_path / f"nvme-{len(pools)}"
            if way.endswith("daemon"):
                return shared_daemon(options)
            started: Node | NetworkNode | TwoNodes
            if way.endswith("pool"):
                started = TwoNodes(options, folder)
            elif way.endswith("network"):
                started = NetworkNode(options.start_node(folder))
            else:
                started = options.start_node(folder)
            nodes.callback(started.close)
            return started

        yield make
        for pool in pools:
            pool.finish()


@pytest.fixture
def pool(way: str, make_pool: Callable[[str, PoolOptions], Pool]) -> Pool:
    """DRAM only."""
    return make_pool(way, PoolOptions())


@pytest.fixture
def deep_pool(way: str, make_pool: Callable[[str, PoolOptions], Pool]) -> Pool:
    """DRAM over NVMe."""
    return make_pool(way, PoolOptions(nvme_blocks=NVME_BLOCKS))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait for a node's answer at a call's deadline, and report damage to it, even if the
    node or this process was stopped for a while."""
    for module in (
        "deadlines",
        "client.connection.node_link",
        "client.verbs.block_verbs",
        "client.pool.remote.peer",
        "client.pool.remote.remote_node",
        "client.pool.remote.remote_source",
        "client.pool.failover_source",
    ):
        monkeypatch.setattr(f"tiffin.kvstore.{module}.GRACE_S", SLACK_S)
    monkeypatch.setattr("tiffin.kvstore.deadlines.OVERRUN_S", 2 * SLACK_S)
    monkeypatch.setattr("tiffin.kvstore.client.pool.remote.peer.POST_TIMEOUT_S", SLACK_S)


@pytest.fixture
def hasty_pool(way: str, make_pool: Callable[[str, PoolOptions], Pool]) -> Pool:
    """Reservations end after a moment."""
    return make_pool(way, PoolOptions(write_lease_s=0.2))
