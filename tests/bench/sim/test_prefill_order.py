"""In which order a prefill instance computes prompts whose blocks come at different times."""

from __future__ import annotations

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.cluster.options import SimulationOptions
from tiffin.bench.sim.instances.prefill_instance import PrefillInstance, PrefillParts
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.sim.nodes.node_cache import TIERS, NodeCache
from tiffin.bench.traces.trace import TraceRequest
from tiffin.conductor.cost import latency_profiles


def test_who_waits_for_blocks_is_skipped_and_keeps_its_place() -> None:
    clock, began = VirtualClock(), list[str]()
    profile = latency_profiles.load(latency_profiles.DEFAULT)
    parts = PrefillParts(
        clock, profile, SimulationOptions(), 512, dict.fromkeys(TIERS, 0.0), lambda one: one
    )
    instance = PrefillInstance(
        "p",
        parts,
        NodeCache(dram_blocks=100),
        lambda _, job, seconds: began.append(job.name),
        lambda _, job: None,
    )
    jobs = [SimRequest(name, TraceRequest(0.0, 1000, 1), ()) for name in "abcd"]
    instance.enqueue(jobs[0], fetching=True)
    for job in jobs[1:]:
        instance.enqueue(job, fetching=False)
    assert began == ["b"]  # not idle while the blocks of a come
    instance.fetched(jobs[0])
    clock.run(lambda: bool(instance.jobs))
    assert began == ["b", "a", "c", "d"]
