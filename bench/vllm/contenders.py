"""What an engine can load from, on this host: our node, and the peers.

Each is started for one measurement, and told to vLLM by a KVTransferConfig.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.cli.local.local_redis import free_port

from ..network import mooncake_peer
from ..network.setting import LOOPBACK, await_answer, greets, node_command
from ..store.setting import MIB
from .engine_process import GroupProcess, service

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .setting import Peer, Setting

NODE_BYTES = 1024 * MIB
_GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Contender:
    """`transfer`: the fields of the engine's KVTransferConfig. `environment`: variables of the
    engine. `polling`: processes that it loads from and that take CPU time when nobody asks them.
    `shared`: another engine may load what one engine saved."""

    transfer: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    polling: Sequence[GroupProcess] = ()
    shared: bool = True


def transfer(url: str, **settings: Any) -> dict[str, Any]:
    """Our connector, with this pool and these settings."""
    return {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, **settings},
    }


@contextlib.contextmanager
def node(**settings: Any) -> Iterator[Contender]:
    """A node on this host. `settings`: the connector's."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        path = Path(folder) / "node.sock"
        url = f"unix:{path}"
        with service("the node", node_command(NODE_BYTES, path)) as process:
            await_answer(process.popen, lambda: greets(url), "the node")
            yield Contender(transfer(url, **settings))


@contextlib.contextmanager
def offloading(_: Setting) -> Iterator[Contender]:
    """vLLM's own offloading to host memory, which no other engine shares."""
    options = {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tiffin.bench.vllm.engine.offloading_spec",
        "cpu_bytes_to_use": NODE_BYTES,
        "block_size": 512,
    }
    yield Contender(_transfer("OffloadingConnector", options), shared=False)


@contextlib.contextmanager
def lmcache(setting: Setting) -> Iterator[Contender]:
    """A server of LMCache, whose memory the engine's workers map. Raises Missing."""
    peer = setting.peer("lmcache", "lmcache.integration.vllm.vllm_multi_process_adapter")
    port = free_port(LOOPBACK)
    environment = {**peer.environment, "LMCACHE_TRACK_USAGE": "false"}
    command = [
        *(str(peer.python), "-m", "lmcache.cli.main", "server"),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--http-host", LOOPBACK, "--http-port", str(free_port(LOOPBACK))),
        *("--l1-size-gb", str(NODE_BYTES / _GIB), "--eviction-policy", "LRU"),
        # What works without a GPU: the worker copies, from and to memory that it shares with the
        # server. Without the name, all bytes go through sockets, which takes 20 times as long.
        *(
            "--supported-transfer-mode",
            "engine_driven",
            "--shm-name",
            f"tiffin-bench-{os.getpid()}",
        ),
        *("--disable-metrics", "--disable-observability"),
    ]
    with service("lmcache server", command, environment) as process:
        await_answer(process.popen, lambda: _accepts(port), "lmcache server")
        options = {"lmcache.mp.host": f"tcp://{LOOPBACK}", "lmcache.mp.port": port}
        yield Contender(_transfer("LMCacheMPConnector", options), environment)


@contextlib.contextmanager
def mooncake(setting: Setting) -> Iterator[Contender]:
    """Mooncake Store over TCP: a master and a process that holds the memory. Raises Missing."""
    peer = setting.peer("mooncake", "mooncake.store")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-bench-")))
        master, address = stack.enter_context(_mooncake_master(peer))
        holder = stack.enter_context(_mooncake_holder(peer, address))
        path = folder / "mooncake.json"
        path.write_text(json.dumps(_mooncake_configuration(address)))
        environment = {
            **peer.environment,
            "MOONCAKE_CONFIG_PATH": str(path),
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": LOOPBACK,
            "GLOG_minloglevel": "2",
        }
        connector = _transfer("MooncakeStoreConnector", {"load_async": True})
        yield Contender(connector, environment, (master, holder))


@contextlib.contextmanager
def _mooncake_master(peer: Peer) -> Iterator[tuple[GroupProcess, str]]:
    port = free_port(LOOPBACK)
    command = [
        *(str(peer.package / "mooncake_master"), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}"),
        *(f"--metrics_host={LOOPBACK}", f"--metrics_port={free_port(LOOPBACK)}"),
        *("--enable_metric_reporting=false", "--minloglevel=2"),
    ]
    with service("mooncake_master", command, peer.environment) as process:
        await_answer(process.popen, lambda: _accepts(port), "mooncake_master")
        yield process, f"{LOOPBACK}:{port}"


@contextlib.contextmanager
def _mooncake_holder(peer: Peer, master: str) -> Iterator[GroupProcess]:
    program = str(mooncake_peer.__file__)
    command = [str(peer.python), program, "holder", master, str(NODE_BYTES)]
    environment = {**peer.environment, "GLOG_minloglevel": "2"}
    process = GroupProcess("Mooncake's holder", command, environment)
    try:
        process.ready()
        yield process
    finally:
        process.end()


def _mooncake_configuration(master: str) -> dict[str, Any]:
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 256 * MIB,
    }


def _transfer(connector: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False
