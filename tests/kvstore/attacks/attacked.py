"""One node with a token, and a relay between it and its clients, at the node's known address."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from attacks.relay import Middle, pass_on
from kvsupport import EXTENT, SCHEMA, payloads_of

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from pathlib import Path

    from attacks.relay import Change

    from tiffin.kvstore import Prefix


class Attacked:
    """`open` gives clients that connect through `middle`; `direct` gives others."""

    def __init__(
        self,
        folder: Path,
        change: Change = pass_on,
        *,
        known: bool = True,
        blocks: int = 64,
        schema: KVSchema = SCHEMA,
        credentials: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.schema = schema
        self.token_file = make_secret_file(folder / f"token-{secrets.token_hex(4)}")
        token = self.token_file.read_bytes().strip()
        self._stack = contextlib.ExitStack()
        extent = schema.extent_bytes
        self.node = Node(NodeOptions(blocks * max(extent, EXTENT), prefault=False), name="attacked")
        self._stack.callback(self.node.close)
        self.middle = Middle(("127.0.0.1", 0), change, **options)
        advertise = self.middle.address if known else None
        self.service = RemoteService(
            self.node, ("127.0.0.1", 0), Credentials(token, **(credentials or {})), advertise
        )
        self._stack.callback(self.service.close)
        self.middle.target = self.service.address
        self._stack.enter_context(self.middle)

    def open(self, verify: Any = "always", **parameters: object) -> Any:
        """A client that connects through the relay; closed with this."""
        return self._open(self.middle.address, verify, parameters)

    def direct(self) -> Any:
        """A client without the relay; only if the node has no other known address."""
        return self._open(self.service.address, "always", {})

    def _open(self, address: tuple[str, int], verify: Any, parameters: dict[str, object]) -> Any:
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        url = f"tiffin://127.0.0.1:{address[1]}?token_file={self.token_file}{more}"
        client = Client.open(url, name="victim", verify=verify)
        self._stack.callback(client.close)
        return client

    def put_inside(self, prefix: Prefix) -> None:
        """Store the right bytes inside the node, without the network."""
        with Client.attach(self.node) as client:
            assert client.put(prefix, payloads_of(prefix)).complete

    def has(self, prefix: Prefix) -> int:
        """How many of the blocks the node has."""
        return sum(self.node.exists(prefix.key_bytes))

    def close(self) -> None:
        self._stack.close()
