"""The layers of a node on this host: views into its mapped region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..blocks.block_views import Payload
from ..verbs.block_verbs import work
from .layer_source import NodeSource

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ...format.schema import HeadRange
    from ...node.core import messages
    from ..blocks.block_views import Selection
    from ..connection.node_link import NodeLink
    from ..verbs.block_verbs import Access

    Bytes = NDArray[np.uint8]


class LocalSource(NodeSource):
    """A stream from a node on this host: its layers are views into the mapped region, no copies."""

    def __init__(
        self,
        link: NodeLink,
        prefix: Prefix,
        access: Access,
        timeout_s: float,
        heads: HeadRange | None = None,
    ) -> None:
        super().__init__(prefix, access, timeout_s, heads)
        self._link = link
        self._memory: Bytes | None = None
        self._payloads: list[Payload] = []

    def _lease(self, request: messages.Lease) -> messages.Leased:
        reply, self._memory = self._link.call(request, request.timeout_s)
        return reply  # type: ignore[no-any-return]

    def _ask(
        self, request: messages.Await, selection: Selection | None
    ) -> tuple[messages.Awaited, list[Any]]:
        reply, _ = self._link.call(request, request.timeout_s)
        if not reply.ready:
            return reply, []
        assert self._leased is not None
        assert self._memory is not None
        begins, size = self._leased.offsets, self.schema.header_bytes
        if selection is None:
            return reply, [self._memory[at : at + size].tobytes() for at in begins]
        views = []
        for at in begins:
            view = self._memory[at + size : at + size + self.schema.block_bytes]
            view.flags.writeable = False
            views.append(view)
        return reply, views

    def _payload(self, block: int, memory: Bytes, selection: Selection) -> Payload:
        payload = Payload(memory, selection, packed=False)
        self._payloads.append(payload)
        return payload

    def _work(self, action: Callable[[], Any]) -> Any:
        return work(self._link, action)

    def _post(self, request: messages.Request) -> None:
        self._link.post(request)

    def end(self) -> None:
        """See `LayerSource.end`; invalidates the views of all layers."""
        for payload in self._payloads:
            payload.let_go()
        self._payloads.clear()
        super().end()
        self._memory = None
