"""Rows about the cost of transfers to an engine: decode steps during transfers, against the same
steps alone.

Not run: there was no GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tiffin.messenger.gpu.copier import DeviceCopier

from ..store.rows import MILLISECONDS, Row, Side, Target, times
from ..store.setting import size_text
from .load import Beside, DecodeSteps
from .transfers import scattered

if TYPE_CHECKING:
    from .setting import Setting

_MOST = 1.05


def decode(setting: Setting) -> list[Row]:
    """Steps that read all weights, during demotions, promotions, and demotions in small pieces."""
    where, sizes = setting.machine, setting.sizes
    where.need_gpu()
    steps = DecodeSteps(
        where,
        batch=sizes.decode_batch,
        shape=sizes.decode_shape,
        layers=sizes.decode_layers,
        steps=sizes.decode_steps,
    )
    near, host = where.bytes_of(sizes.transfer_bytes), where.pinned(sizes.transfer_bytes)
    piece_bytes = max(sizes.piece_bytes)
    there, back = scattered(where, near, host, piece_bytes)
    small = f"pieces of {size_text(piece_bytes)}"
    kinds: tuple[tuple[str, str, Any], ...] = (
        ("down", "one piece goes down", (host, near)),
        ("up", "one piece comes up", (near, host)),
        (f"down-{size_text(piece_bytes)}", f"{small} go down", there),
        (f"up-{size_text(piece_bytes)}", f"{small} come up", back),
    )
    rows = []
    with DeviceCopier(str(where.device)) as copier:
        for name, text, asked in kinds:
            setting.tell(text)
            beside = Beside(partial(copier.submit, [[asked]]))
            sides = [Side(steps.run), beside.side(steps.run)]
            measured = where.turns(sides, rounds=sizes.rounds)
            alone, slowed = (times(seconds, MILLISECONDS) for seconds in measured)
            rows.append(
                Row(
                    f"decode-{name}",
                    f"decode steps that read {steps.nbytes / 1e9:.1f} GB of weights, while {text}",
                    "ms",
                    slowed,
                    "the same steps alone",
                    alone,
                    beside.judged(Target("ratio", "<=", _MOST)),
                    beside.note,
                )
            )
    return rows
