"""Rows about gather and scatter: pages into blocks and back, against a copy of as many bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from ..store.rows import Row, Side, Target, rates
from .case import Case, head_slice, latents, llama

if TYPE_CHECKING:
    from .case import Model, Order
    from .setting import Setting

Verb = Literal["gather", "scatter"]

# Targets, as shares of the rate of a plain copy.
_WHOLE_GPU, _WHOLE_CPU, _PART_GPU = 0.85, 0.5, 0.7


def gathers(setting: Setting) -> list[Row]:
    """Pages of all sizes and both orders into blocks."""
    return _whole(setting, "gather")


def scatters(setting: Setting) -> list[Row]:
    """Blocks into pages of all sizes and both orders."""
    return _whole(setting, "scatter")


def parts(setting: Setting) -> list[Row]:
    """One rank's heads of a tensor-parallel model, and latents; both directions, small pages."""
    rows = []
    for model in (head_slice(setting.sizes), latents(setting.sizes)):
        case = _case(setting, model, setting.sizes.page_tokens[0])
        # On a CPU the speed of its cores bounds pieces this small: there is no target for that.
        targets = (Target("ratio", ">=", _PART_GPU),) if setting.machine.on_gpu else ()
        rows += _rows(setting, case, "gather", targets)
        rows += _rows(setting, case, "scatter", targets)
    return rows


def _whole(setting: Setting, verb: Verb) -> list[Row]:
    bound = _WHOLE_GPU if setting.machine.on_gpu else _WHOLE_CPU
    orders: tuple[Order, Order] = ("nhd", "hnd")
    rows = []
    for page_tokens in setting.sizes.page_tokens:
        for order in orders:
            # The case is not kept in a variable: two of them at a time would be 3 GiB.
            targets = (Target("ratio", ">=", bound),)
            rows += _rows(
                setting, _case(setting, llama(setting.sizes), page_tokens, order), verb, targets
            )
    return rows


def _case(setting: Setting, model: Model, page_tokens: int, order: Order = "nhd") -> Case:
    setting.tell(f"{model.name or 'whole'} pages of {page_tokens} tokens, {order}")
    case = Case(
        setting.machine,
        model,
        blocks=setting.sizes.blocks,
        block_tokens=setting.sizes.block_tokens,
        page_tokens=page_tokens,
        order=order,
    )
    case.check()
    return case


def _rows(setting: Setting, case: Case, verb: Verb, targets: tuple[Target, ...]) -> list[Row]:
    """A row against a plain copy, with a target, and one against the naive way, for information."""
    ours, naive = (
        (case.gather, case.naive_gather) if verb == "gather" else (case.scatter, case.naive_scatter)
    )
    machine, rounds = setting.machine, setting.sizes.rounds
    to_rates = partial(rates, nbytes=case.nbytes)
    value, copied = map(to_rates, machine.turns([Side(ours), Side(case.copy)], rounds=rounds))
    # The naive way takes ten times as long on a CPU, so it has fewer rounds.
    pair = machine.turns([Side(ours), Side(naive)], rounds=max(3, rounds // 5))
    again, naively = map(to_rates, pair)
    name = "-".join((verb, case.model.name or case.order, str(case.page_tokens)))
    what = f"{verb} of {case.count} blocks of {case.layout.nbytes:,} bytes, {_pieces(case)}"
    index = "index_select" if verb == "gather" else "index_copy_"
    return [
        Row(name, what, "GB/s", value, setting.machine.copy_text, copied, targets),
        Row(f"{name}-naive", what, "GB/s", again, f"torch.{index} and permute", naively),
    ]


def _pieces(case: Case) -> str:
    model = case.model
    shape = f"{model.layers} layers, {model.heads} heads of {model.dim}"
    order = "" if model.heads == 1 else f" {case.order.upper()}"
    return f"{shape}, pages of {case.page_tokens} tokens{order}"
