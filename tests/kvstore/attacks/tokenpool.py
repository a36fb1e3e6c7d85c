"""A pool with a token and a real Redis, as in use, except that its nodes run in this process."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsupport import EXTENT, payloads_of, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.cli.daemon import DaemonOptions, in_a_pool, listening
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.credentials import Credentials, read_token
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix
    from tiffin.kvstore.client.verbs.block_verbs import PutResult


class TokenPool:
    """`nodes` by name; `url` opens clients of it. Closed by `close`."""

    def __init__(self, redis_url: str, folder: Path, names: tuple[str, ...] = ("a", "b")) -> None:
        self.name = f"attacked-{secrets.token_hex(4)}"
        self.directory = redis_url
        self.token_file = make_secret_file(folder / f"{self.name}.token")
        self.credentials = Credentials(read_token(self.token_file))
        self.nodes: dict[str, Node] = {}
        self.addresses: dict[str, tuple[str, int]] = {}
        self._stack = contextlib.ExitStack()
        for name in names:
            self.start(name)

    @property
    def url(self) -> str:
        mark = "&" if "?" in self.directory else "?"
        return f"{self.directory}{mark}pool={self.name}&token_file={self.token_file}&home=none"

    def start(self, name: str, blocks: int = 64) -> Node:
        """Start one more node; it is registered when this returns."""
        node = Node(NodeOptions(blocks * EXTENT, prefault=False), name=name)
        self._stack.callback(node.close)
        options = DaemonOptions(
            node.options,
            name,
            Path(f"/nowhere/{self.name}/{name}"),
            listen=("127.0.0.1", 0),
            directory=self.directory,
            pool=self.name,
            credentials=self.credentials,
        )
        address = self._stack.enter_context(listening(node, options))
        assert address is not None
        self._stack.enter_context(in_a_pool(node, options, address))
        host, _, port = address.rpartition(":")
        self.addresses[name] = host, int(port)
        self.nodes[name] = node
        wait_until(lambda: node.extra_numbers["directory"]()["number"], f"{name} registers")
        return node

    def open(self, **parameters: object) -> Any:
        """A client; close it."""
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        return Client.open(self.url + more, name="victim", verify="always")

    def put(self, client: Client, prefix: Prefix) -> PutResult:
        """Put the right bytes."""
        return client.put(prefix, payloads_of(prefix))

    def blocks(self) -> int:
        """How many blocks all nodes have together."""
        return sum(node.statistics()["blocks"] for node in self.nodes.values())

    def close(self) -> None:
        self._stack.close()
