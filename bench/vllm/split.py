"""Times to the first token of prompts that one vLLM prefills and another one decodes, behind a
gateway and a conductor, the KV through one node."""

from __future__ import annotations

import contextlib
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.records import Role
from tiffin.kvstore.cli.local.local_pool import LocalPool, LocalPoolOptions

from ..serving.completions import ask
from ..serving.conducting import PROFILE
from ..serving.split_service import START_S, front, started_instances
from ..store.rows import MILLISECONDS, Row, Target, times
from .engine.model import VOCABULARY
from .engine_process import model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..serving.completions import Answer
    from ..serving.servers import Handoff, Server
    from .setting import Setting

_LENGTHS = (1024, 1500, 2900)  # two whole blocks, and such that end within one
_ANSWER_TOKENS = 4
_DRAM = "1GiB"


@dataclass(frozen=True, slots=True)
class SplitService:
    """The instances, each asked directly, and the gateway before them."""

    prefill: Server
    decode: Server
    gateway: Server


@dataclass(slots=True)
class Turns:
    """Seconds to the first token of prompts of `tokens` tokens, split and by one instance alone;
    `loaded`: how many of its tokens the instance that decodes has loaded, by prompt."""

    tokens: int
    split: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    def row(self, name: str, bound: float | None) -> Row:
        """What the split takes beside one instance. `bound`: the target of the ratio."""
        loaded = " to ".join(str(n) for n in sorted({min(self.loaded), max(self.loaded)}))
        return Row(
            name=f"{name}-{self.tokens}",
            what=f"first token of {self.tokens} tokens that one vLLM prefills and another one "
            "decodes, through a gateway",
            unit="ms",
            value=times(self.split, MILLISECONDS),
            limit_what="one vLLM that computes all of it, asked directly, in turns",
            limit=times(self.alone, MILLISECONDS),
            targets=(Target("ratio", "<=", bound),) if bound else (),
            note=f"{loaded} tokens of each prompt loaded by the one that decodes",
        )


def split(setting: Setting) -> list[Row]:
    """The instance that decodes is asked once the prefill has ended."""
    return _rows(setting, "split", "pool", bound=1.1)


def split_stream(setting: Setting) -> list[Row]:
    """Both are asked at once, and the KV is loaded layer by layer while it is computed."""
    return _rows(setting, "split-stream", "stream", bound=None, layerwise="always")


def _rows(
    setting: Setting, name: str, handoff: Handoff, bound: float | None, **prefill: Any
) -> list[Row]:
    setting.tell("a node, two vLLMs, a conductor and a gateway")
    rows = []
    with _service(setting, handoff, prefill) as service:
        for tokens in _LENGTHS:
            setting.tell(f"{tokens} tokens, split and alone, in turns")
            rows.append(measured(service, tokens, setting.sizes.rounds).row(name, bound))
    return rows


@contextlib.contextmanager
def _service(setting: Setting, handoff: Handoff, prefill: dict[str, Any]) -> Iterator[SplitService]:
    """All processes, ready. `prefill`: the connector's settings where it prefills."""
    python = setting.python()
    # There is one instance of each kind: nothing to choose, so any profile will do.
    profile = latency_profiles.load(latency_profiles.DEFAULT)
    profile = msgspec.structs.replace(profile, name=PROFILE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-bench-")))
        pool = stack.enter_context(LocalPool(LocalPoolOptions(nodes=1, dram=_DRAM, redis=True)))
        weights = stack.enter_context(model(setting))
        started = started_instances(pool, python, weights, folder, **prefill)
        instances = stack.enter_context(started)
        (prefills,), (decodes,) = instances[Role.PREFILL], instances[Role.DECODE]
        for one in (prefills, decodes):
            one.wait("/health", START_S)
        _, gateway = stack.enter_context(front(pool, profile, instances, handoff, folder))
        yield SplitService(prefills, decodes, gateway)


def measured(service: SplitService, tokens: int, rounds: int) -> Turns:
    """Fresh prompts, each asked of one instance alone and then split; a first one warms up. Raises
    AssertionError for other tokens than those of one instance, ProcessFailed."""
    turns = Turns(tokens)
    for number in range(rounds + 1):
        name = f"{tokens}-{number}"
        prompt = random.Random(name).choices(range(VOCABULARY), k=tokens)
        # A salt of its own changes all keys: nothing is found.
        alone = ask(service.decode, prompt, _ANSWER_TOKENS, f"alone-{name}", cache_salt=name)
        before = service.decode.counter("tiffin_loaded_tokens")
        split = ask(service.gateway, prompt, _ANSWER_TOKENS, f"split-{name}")
        _check(service, alone, split)
        if number:
            turns.alone.append(alone.arrivals_s[0])
            turns.split.append(split.arrivals_s[0])
            turns.loaded.append(service.decode.counter("tiffin_loaded_tokens") - before)
    return turns


def _check(service: SplitService, alone: Answer, split: Answer) -> None:
    assert split.tokens == alone.tokens, "other tokens than one instance says"
    expected = service.prefill.name, service.decode.name
    assert (split.prefill, split.decode) == expected, f"not split: {split.prefill} prefilled"
