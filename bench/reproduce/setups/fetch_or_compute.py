"""Whether an instance fetches the cached part of a prompt or computes it: what the conductor says,
and how long either takes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost.latency_model import prefill_s
from tiffin.conductor.cost.transfer_model import BANDWIDTH_BYTES_S_MAX
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.records import Decision, InstanceSpec, Request, Role

from ...sim.clock import VirtualClock
from ...sim.nodes.network import Network

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

BLOCK_TOKENS = 512
TOKEN_BYTES = 327_680  # Llama-3-70B's keys and values
_QUEUED_TOKENS = 8192
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A prompt of which another node has the first `cached_blocks`, at an instance that has none.

    `queued`: prompts before it there, of 8,192 tokens each. `rivals`: others who fetch the same
    blocks from the same node since just now.
    """

    prompt_tokens: int
    cached_blocks: int
    bandwidth_bytes_s: float
    queued: int = 0
    rivals: int = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes of all that is cached."""
        return self.cached_blocks * BLOCK_TOKENS * TOKEN_BYTES


def fetched_blocks(cell: Cell, profile: Profile, policy: str, latency_s: float) -> int:
    """How many blocks the conductor has it fetch, under a policy for prefill."""
    links = {
        "link_bandwidth_bytes_s": cell.bandwidth_bytes_s,
        "link_latency_s": latency_s,
        # As in the papers' rules, what was fetched is not loaded from memory, too.
        "dram_bandwidth_bytes_s": BANDWIDTH_BYTES_S_MAX,
    }
    changes = {"transfers": links, "policy": {"name": policy}, "admission": {"mode": "off"}}
    core = Conductor(
        patched(Settings(), changes), dice=random.Random(0), profile=lambda name: profile
    )
    for name, role in (("holder", Role.PREFILL), ("here", Role.PREFILL), ("decode", Role.DECODE)):
        spec = InstanceSpec(
            *(name, "m", role, profile.name),
            node=f"node-{name}",
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
            kv_capacity_tokens=8_000_000,
        )
        core.register(spec, 0.0)
    keys = tuple(number.to_bytes(_KEY_BYTES) for number in range(cell.cached_blocks))
    core.apply(Added("node-holder", "dram", keys), 0.0)
    not_there = ("holder",)
    for number in range(cell.queued):
        core.schedule(Request(f"q{number}", "m", _QUEUED_TOKENS, exclude=not_there), 0.0)
    for _ in range(cell.rivals):
        core.transfers.begin(core.cluster.find_node("node-holder"), cell.cached_bytes, 0.0)
    asked = Request("r", "m", cell.prompt_tokens, keys, exclude=not_there)
    decision = core.schedule(asked, 0.0)
    assert isinstance(decision, Decision), "there is no admission control"
    return max((fetch.stop for fetch in decision.fetches), default=0)


def ttft_s(cell: Cell, profile: Profile, latency_s: float, blocks: int) -> float:
    """Seconds to the first token: the prompt waits in the queue and for the blocks that it fetches,
    which share the sender's card with those of the rivals; what it does not fetch it computes."""
    clock, at_s = VirtualClock(), list[float]()
    network = Network(clock, cell.bandwidth_bytes_s, latency_s)
    for number in range(cell.rivals):
        network.send("holder", f"rival-{number}", cell.cached_bytes, lambda: None)
    nbytes = blocks * BLOCK_TOKENS * TOKEN_BYTES
    network.send("holder", "here", nbytes, lambda: at_s.append(clock.now_s))
    clock.run(lambda: not at_s)
    queue_s = cell.queued * float(prefill_s(*profile.prefill, _QUEUED_TOKENS, 0))
    computing_s = prefill_s(*profile.prefill, cell.prompt_tokens, blocks * BLOCK_TOKENS)
    return max(queue_s, at_s[0]) + float(computing_s)
