"""`TiffinConnector`, which says how long vLLM's threads spend in its hooks, and its own threads at
work. Imported by vLLM, by the name in `kv_connector_module_path`.

Each side appends lines of JSON to a file of its own in the folder that FOLDER_VARIABLE names, with
everything since its start: see `Sample`.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tiffin.kvstore.connectors.vllm import TiffinConnector

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER_VARIABLE = "TIFFIN_BENCH_HOOKS"
# Time between two samples. A sample takes 0.1 ms and more, which is not counted as a hook's.
_INTERVAL_S = 0.02
_THREADS = "tiffin-"
# Each step calls this hook of a side once.
_STEP_HOOKS = {
    KVConnectorRole.SCHEDULER: "build_connector_meta",
    KVConnectorRole.WORKER: "start_load_kv",
}


@dataclass(slots=True)
class Sample:
    """Since the side's start, at `at_s` of the machine's monotonic clock: `hook_s` by hook, CPU
    time of the connector's threads, and steps."""

    at_s: float = 0.0
    steps: int = 0
    thread_s: float = 0.0
    hook_s: dict[str, float] = field(default_factory=dict)


class HookClock:
    """The clock of one side's hooks. `begin` and `end` are called by one thread."""

    def __init__(self, path: Path, step_hook: str) -> None:
        self._path, self._step_hook = path, step_hook
        self._sample = Sample()
        self._depth = 0

    def run(self, name: str, hook: Callable[[], Any]) -> Any:
        """Call a hook; one that another hook calls is not counted again."""
        if self._depth:
            return hook()
        if name == self._step_hook:
            self._step()
        self._depth += 1
        began = time.perf_counter()
        try:
            return hook()
        finally:
            taken_s = time.perf_counter() - began
            self._depth -= 1
            known = self._sample.hook_s
            known[name] = known.get(name, 0.0) + taken_s

    def _step(self) -> None:
        now = time.monotonic()
        if now >= self._sample.at_s + _INTERVAL_S:
            self._sample.at_s, self._sample.thread_s = now, threads_s()
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(self._sample)) + "\n")
        self._sample.steps += 1


def threads_s() -> float:
    """CPU time of this process's threads that are the connector's, of those that still run."""
    found = 0
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            try:
                words = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            except OSError:  # it has just ended
                continue
            found += int(words.split()[0])
    return found / 1e9


class TimedTiffinConnector(TiffinConnector):  # type: ignore[misc]
    """See the top of this file."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        side = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        path = Path(os.environ[FOLDER_VARIABLE]) / f"{side}-{os.getpid()}.jsonl"
        self.clock = HookClock(path, _STEP_HOOKS[role])
        super().__init__(vllm_config, role, kv_cache_config)


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(self: TimedTiffinConnector, *arguments: Any, **options: Any) -> Any:
        return self.clock.run(name, functools.partial(hook, self, *arguments, **options))

    return timed


for _name, _hook in vars(TiffinConnector).items():
    if callable(_hook) and not _name.startswith("_") and not isinstance(_hook, type):
        setattr(TimedTiffinConnector, _name, _timed(_name, _hook))
