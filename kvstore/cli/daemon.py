"""A node as a daemon: the node, its unix socket, its network port, its place in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..client.pool.replication.replication_service import Caretaker
from ..client.pool.verb_driver import VerbDriver
from ..credentials import Credentials
from ..directory import NodeRecord, host_id, open_directory
from ..errors import InvalidInput
from ..gc_tuning import calm_collector
from ..node.nixl_grants import offering
from ..node.node import Node, NodeOptions
from ..node.publisher import Publisher, PublisherOptions
from ..node.server.tcp_server import RemoteService
from ..node.server.unix_server import UnixServer
from ..sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("tiffin.node")


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What an operator chooses about a node's surroundings.

    `listen`: the address of its network port; port 0 takes any. `advertise`: the address under
    which others reach it, when that is another. `directory`: a URL for `open_directory`.
    `nixl`: offer DRAM for one-sided reads, over `nixl_lanes` of UCX.
    """

    node: NodeOptions
    name: str
    socket: Path
    listen: tuple[str, int] | None = None
    advertise: tuple[str, int] | None = None
    directory: str = ""
    pool: str = "default"
    credentials: Credentials = field(default_factory=Credentials)
    nixl: bool = False
    nixl_lanes: str = ""

    def __post_init__(self) -> None:
        if self.directory and self.listen is None:
            raise InvalidInput("a node in a directory needs --listen, for others to reach it")
        if self.directory and self.credentials.tls_cert and self.credentials.tls_ca is None:
            raise InvalidInput(
                "a node of a pool connects to the others as well: with TLS, give --tls-ca too"
            )
        if self.nixl and self.credentials.of_bytes:
            raise InvalidInput(
                "--nixl and --authenticate bytes: what is read one-sidedly goes past both; choose"
            )
        if self.listen is not None and self.advertise is None and _anywhere(self.listen[0]):
            raise InvalidInput(
                f"--listen {self.listen[0]} is every address of this machine: say with --advertise "
                "HOST:PORT under which one others reach it"
            )


async def serve(options: DaemonOptions) -> None:
    """Run a node until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    node = Node(options.node, name=options.name, awaits_peers=bool(options.directory))
    calm_collector()
    try:
        async with UnixServer(node, options.socket):
            with contextlib.ExitStack() as stack:
                address = stack.enter_context(listening(node, options))
                if options.nixl:
                    stack.enter_context(
                        offering(node.name, node.dram.region.array, node.handle, options.nixl_lanes)
                    )
                if options.directory:
                    assert address is not None
                    stack.enter_context(in_a_pool(node, options, address))
                _announce(node, options, address)
                await stop.wait()
                log.info("stopping")
    finally:
        node.close()


@contextlib.contextmanager
def listening(node: Node, options: DaemonOptions) -> Iterator[str | None]:
    """The network port, if there is to be one; the address under which others reach it."""
    if options.listen is None:
        yield None
        return
    service = RemoteService(node, options.listen, options.credentials, options.advertise)
    try:
        yield service.advertised
    finally:
        service.close()


@contextlib.contextmanager
def in_a_pool(
    node: Node,
    options: DaemonOptions,
    address: str,
    publishing: PublisherOptions | None = None,
) -> Iterator[None]:
    """The node's place in the directory, and what it does for the others."""
    directory = open_directory(
        options.directory, pool=options.pool, token=options.credentials.token
    )
    driver = VerbDriver(directory, options.credentials, f"node {options.name}")
    arena = node.core.residency.dram.arena

    def record() -> NodeRecord:
        return NodeRecord(
            name=options.name,
            address=address,
            host=host_id(),
            socket=os.path.realpath(options.socket),
            capacity_bytes=arena.capacity_bytes,
            free_bytes=arena.free_bytes,
            draining=node.draining,
            links=driver.link_summary(),
            slab=node.slab.hex() if caretaker.returning.current else "",
        )

    publisher = Publisher(node, directory, record, publishing)
    node.on_remote_miss = lambda key: publisher.not_mine([key])
    node.extra_numbers["directory"] = lambda: {
        "number": publisher.number,
        "healthy": publisher.healthy,
        "lag_events": publisher.lag,
        "reason": publisher.reason,
    }
    caretaker = Caretaker(node, directory, driver, lambda: publisher.number)
    publisher.start()
    try:
        yield
    finally:
        publisher.close()
        node.on_remote_miss = None
        caretaker.close()  # with the driver and, through it, the directory


def _announce(node: Node, options: DaemonOptions, address: str | None) -> None:
    found = ""
    if options.node.nvme_path and not options.directory:  # else it is said when they are served
        found = f", {len(node.core.index)} blocks found in NVMe"
    at = f" and {address}" if address else ""
    log.info(
        "%s serves %s at unix:%s%s%s",
        options.name, _tiers_in_words(options.node), options.socket, at, found,
    )  # fmt: skip
    credentials = options.credentials
    if options.listen is not None and not credentials.authenticates:
        log.warning("the network port has no token: every user of this machine can use it")


def _anywhere(host: str) -> bool:
    return host in ("0.0.0.0", "::", "*", "")


def _tiers_in_words(options: NodeOptions) -> str:
    words = f"{format_bytes(options.dram_bytes)} DRAM"
    if options.nvme_path is not None:
        words += f" and {format_bytes(options.nvme_bytes)} NVMe in {options.nvme_path}"
    return words


__all__ = ["DaemonOptions", "serve"]
