"""Prefill and decode apart: vLLM instances of both kinds on one node, behind a conductor and a
gateway."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Load, Role

from ..serving import servers
from .conducting import conductor
from .errors import ProcessFailed
from .presence import Presence
from .servers import SCHEMA, Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.kvstore.cli.local.local_pool import LocalPool

    from .servers import Handoff

    Instances = Mapping[Role, Sequence[Server]]

_LOOK_S = 0.1
START_S = 300.0  # several processes import vLLM, on a few cores


@contextlib.contextmanager
def started_instances(
    pool: LocalPool, python: Path, model: str, folder: Path, workers: int = 1, **prefill: Any
) -> Iterator[Instances]:
    """Instances that prefill, and as many that decode, which need not answer yet. `prefill`:
    settings of the connector in those that do."""
    url = f"unix:{pool.socket()}"
    found: dict[Role, list[Server]] = {Role.PREFILL: [], Role.DECODE: []}
    with contextlib.ExitStack() as stack:
        for role, kv_role, settings in (
            (Role.PREFILL, "kv_both", prefill),
            (Role.DECODE, "kv_consumer", {}),
        ):
            for number in range(1, workers + 1):
                name = f"{role}-{number}"
                one = servers.vllm(name, kv_role, python, model, url, folder, **settings)
                found[role].append(stack.enter_context(one))
        yield found


@contextlib.contextmanager
def front(
    pool: LocalPool, profile: Profile, instances: Instances, handoff: Handoff, folder: Path
) -> Iterator[tuple[str, Server]]:
    """The URL of a conductor at which all instances have registered and which knows what they have
    announced, and a gateway that is ready. Raises ProcessFailed, ConductorError."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(conductor(pool, profile, folder, START_S)).url
        for role, of_role in instances.items():
            for one in of_role:
                spec = InstanceSpec(
                    *(one.name, servers.MODEL, role, profile.name),
                    url=one.url,
                    node=pool.names[0],
                    block_tokens=SCHEMA.block_tokens,
                    block_bytes=SCHEMA.block_bytes,
                    kv_capacity_tokens=servers.PAGES * servers.PAGE_TOKENS,
                )
                stack.enter_context(Presence(url, spec, Load))
        with ConductorClient(url) as client:
            deadline = time.monotonic() + START_S
            while not all(one.keyed for one in client.instances()):
                if time.monotonic() > deadline:
                    raise ProcessFailed("no instance has announced what its keys are made of")
                time.sleep(_LOOK_S)
        gateway = stack.enter_context(servers.gateway(url, handoff, folder))
        gateway.wait("/readyz", START_S)
        yield url, gateway
