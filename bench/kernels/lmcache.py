"""Rows that compare with LMCache, if installed: its kernel for all layers of one chunk at a time.

They call the function that its own connectors call (release 0.5.6), `multi_layer_kv_transfer` of
its compiled extension, once per block, with chunks of the same length. Its chunks are [2, layers,
tokens, heads * dim]: nothing is reordered, while our blocks have all tokens of a head side by side.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..store.rows import Row, Side, rates
from ..suite import Missing
from .case import Case, llama

if TYPE_CHECKING:
    from .setting import Setting

_EXTENSIONS = ("lmcache.cuda_ops", "lmcache.c_ops")
_NAMES = ("lmcache.lmcache_native", *_EXTENSIONS)  # modules of the enumerations
_FORMAT = "NL_X_TWO_NB_BS_NH_HS"  # per layer [2, pages, page_tokens, heads, dim]


def lmcache(setting: Setting) -> list[Row]:
    """Gather and scatter of small NHD pages, ours and LMCache's in turns."""
    setting.machine.need_gpu()
    peer = _Peer(setting)
    case = peer.case
    sides = [Side(case.gather), Side(peer.gather), Side(case.scatter), Side(peer.scatter)]
    measured = setting.machine.turns(sides, rounds=setting.sizes.rounds)
    found = [rates(seconds, case.nbytes) for seconds in measured]
    text = f"{case.count} blocks of {case.layout.nbytes:,} bytes, pages of {case.page_tokens} NHD"
    limit = "LMCache's multi_layer_kv_transfer, a call per block, token-major"
    return [
        Row(f"lmcache-{verb}", f"{verb} of {text}", "GB/s", ours, limit, theirs)
        for verb, ours, theirs in zip(("gather", "scatter"), found[::2], found[1::2], strict=True)
    ]


class _Peer:
    """LMCache's kernel over the cache of one of our cases, with its own chunks."""

    def __init__(self, setting: Setting) -> None:
        self._move = _first(_EXTENSIONS, "multi_layer_kv_transfer")
        directions = _first(_NAMES, "TransferDirection")
        self._directions = directions.D2H, directions.H2D
        self._format = getattr(_first(_NAMES, "EngineKVFormat"), _FORMAT)
        sizes, where = setting.sizes, setting.machine
        torch = where.torch
        self.case = case = Case(
            where,
            llama(sizes),
            blocks=sizes.blocks,
            block_tokens=sizes.block_tokens,
            page_tokens=sizes.page_tokens[0],
        )
        hidden = case.model.heads * case.model.dim
        shape = (case.count, 2, case.model.layers, sizes.block_tokens, hidden)
        self._chunks = torch.empty(shape, dtype=torch.bfloat16, device=where.device)
        addresses = [layer.data_ptr() for layer in case.storage.unbind(0)]
        self._layers = torch.tensor(addresses, dtype=torch.int64, device=where.device)
        places = torch.arange(case.page_tokens, device=where.device)
        slots = case.ids[:, None] * case.page_tokens + places
        self._slots = slots.reshape(case.count, sizes.block_tokens)
        self._check()

    def gather(self) -> None:
        """Gather pages into chunks."""
        self._all(self._directions[0])

    def scatter(self) -> None:
        """Scatter chunks into pages."""
        self._all(self._directions[1])

    def _all(self, direction: Any) -> None:
        case = self.case
        slot_count = case.storage.shape[2] * case.page_tokens
        for chunk, slots in zip(self._chunks, self._slots, strict=True):
            self._move(
                chunk,
                self._layers,
                slots,
                case.where.device,
                slot_count,
                direction,
                self._format,
                block_size=case.page_tokens,
                head_size=case.model.dim,
            )

    def _check(self) -> None:
        """Raises ValueError unless it moves the same tokens as our kernel."""
        case = self.case
        self.gather()
        case.where.synchronise()
        rows = case.storage.flatten(2, 3).flatten(-2)  # [layers, 2, slots, heads * dim]
        picked = rows[:, :, self._slots.reshape(-1)].unflatten(2, (case.count, -1))
        if not case.where.torch.equal(picked.permute(2, 1, 0, 3, 4), self._chunks):
            raise ValueError("LMCache's kernel did not give the chunks that were expected")


def _first(modules: tuple[str, ...], name: str) -> Any:
    """The attribute `name` of the first module that has it. Raises Missing."""
    reasons = []
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    raise Missing(f"needs LMCache for CUDA, in this environment ({'; '.join(reasons)})")
