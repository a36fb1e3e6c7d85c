"""Times to the first token of a prompt that another engine has computed."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..network.setting import await_answer, greets, node_command, remote_node, running
from ..store.rows import Row, Spread, Target
from ..store.setting import MIB
from .setting import Setting, Times, measure, model

if TYPE_CHECKING:
    from collections.abc import Iterator

_NODE_BYTES = 1024 * MIB
_OWN = "the same prompt from vLLM's own prefix cache, in turns"


def home(setting: Setting) -> list[Row]:
    """A fresh engine loads from the node on its host: in vLLM's default mode of processes, and in
    one process."""
    rows = []
    for in_process in (False, True):
        name = "home-in-process" if in_process else "home"
        with _node() as url, model(setting) as folder:
            times = _second_engine(setting, folder, url, in_process=in_process)
        rows.append(_row(setting, name, "from the node on this host", times, bound=1.4))
    return rows


def remote(setting: Setting) -> list[Row]:
    """A fresh engine loads from a node that it reaches by TCP."""
    with remote_node(_NODE_BYTES) as node, model(setting) as folder:
        times = _second_engine(setting, folder, f"{node.url}?home=none", in_process=False)
    return [_row(setting, "remote", "from a node over loopback TCP", times, bound=2.2)]


def offloading(setting: Setting) -> list[Row]:
    """vLLM's own offloading to host memory, which no other engine shares, and ours beside it: what
    each adds to vLLM's own prefix cache."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "offloading_spec",
            "cpu_bytes_to_use": _NODE_BYTES,
            "block_size": 512,
        },
    }
    with _node() as url, model(setting) as folder:
        setting.tell("vLLM's OffloadingConnector")
        peer = measure(setting, folder, transfer, in_process=False, computes=True)
        ours = _second_engine(setting, folder, url, in_process=False)
    added = Row(
        name="added-beside-offloading",
        what="what loading from the node on this host adds to vLLM's own prefix cache",
        unit="ms",
        value=_added(ours),
        limit_what="what vLLM's OffloadingConnector adds, in one engine",
        limit=_added(peer),
        targets=(Target("ratio", "<=", 0.7),),
    )
    return [_row(setting, "offloading", "by vLLM's OffloadingConnector", peer, bound=None), added]


def _second_engine(setting: Setting, folder: str, url: str, *, in_process: bool) -> Times:
    """One engine computes the prompts and ends; another, fresh one is measured."""
    transfer = _transfer(url)
    setting.tell("the engine that computes")
    first = measure(setting, folder, transfer, in_process=in_process, computes=True, rounds=0)
    setting.tell("the engine that loads")
    second = measure(setting, folder, transfer, in_process=in_process, computes=False)
    assert list(second.tokens) == list(first.tokens), "other tokens than were computed"
    missed = f"not all was loaded: {second.cached}"
    assert min(second.cached) >= setting.sizes.tokens // 512 * 512, missed
    return Times(first.cold, second.loaded, second.own, second.cached, second.tokens)


def _transfer(url: str) -> dict[str, Any]:
    return {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


def _row(setting: Setting, name: str, source: str, times: Times, bound: float | None) -> Row:
    cold = sorted(times.cold)[len(times.cold) // 2]
    return Row(
        name=name,
        what=f"first token of {setting.sizes.tokens} tokens, {max(times.cached)} of them loaded "
        f"{source}",
        unit="ms",
        value=_spread(times.loaded),
        limit_what=_OWN,
        limit=_spread(times.own),
        targets=(Target("ratio", "<=", bound),) if bound else (),
        note=f"computed: {cold:.0f} ms",
    )


def _added(times: Times) -> Spread:
    return _spread([a - b for a, b in zip(times.loaded, times.own, strict=True)])


def _spread(milliseconds: Any) -> Spread:
    return Spread.of(list(milliseconds), lower_is_better=True)


@contextlib.contextmanager
def _node() -> Iterator[str]:
    """The URL of a node on this host."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        socket = Path(folder) / "node.sock"
        url = f"unix:{socket}"
        with running(node_command(_NODE_BYTES, socket)) as process:
            await_answer(process, lambda: greets(url), "the node")
            yield url
