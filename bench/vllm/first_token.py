"""Times to the first token of a prompt that another engine has computed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..network.setting import remote_node
from ..vllm import contenders
from .contenders import NODE_BYTES, Contender
from .engine.engine import EngineOptions
from .engine_process import GroupProcess, engine, model
from .times import Times, added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..store.rows import Row
    from .setting import Setting


def home(setting: Setting) -> list[Row]:
    """A fresh engine loads from the node on its host: in vLLM's default mode of processes, and in
    one process."""
    rows = []
    for in_process in (False, True):
        name = "home-in-process" if in_process else "home"
        with model(setting) as folder, contenders.node() as ours:
            times = _alone(setting, folder, ours, in_process=in_process)
        rows.append(times.row(setting.sizes, name, "from the node on this host", bound=1.4))
    return rows


def remote(setting: Setting) -> list[Row]:
    """A fresh engine loads from a node that it reaches by TCP."""
    with model(setting) as folder, remote_node(NODE_BYTES) as node:
        ours = Contender(contenders.transfer(f"{node.url}?home=none"))
        times = _alone(setting, folder, ours)
    return [times.row(setting.sizes, "remote", "from a node over loopback TCP", bound=2.2)]


def layerwise(setting: Setting) -> list[Row]:
    """Loads beside the forward pass, layer after layer, beside loads before it."""
    with (
        model(setting) as folder,
        contenders.node(layerwise="never") as before,
        contenders.node(layerwise="always") as beside,
        _loader(setting, folder, before) as whole,
        _loader(setting, folder, beside) as layers,
    ):
        setting.tell("loads before and beside the forward pass, in turns")
        _in_turns((whole, layers), setting.sizes.rounds)
    source = "from the node on this host, layer after layer"
    what = "a load before the forward pass"
    return [
        layers.times.row(setting.sizes, "layerwise", source, bound=None),
        added("whole-loads", layers.times, whole.times, what, bound=None),
    ]


def offloading(setting: Setting) -> list[Row]:
    """vLLM's own offloading beside ours, in one engine."""
    return _beside(setting, "offloading", "vLLM's OffloadingConnector", contenders.offloading)


def lmcache(setting: Setting) -> list[Row]:
    """LMCache's server and connector beside ours."""
    return _beside(setting, "lmcache", "LMCache's server", contenders.lmcache)


def mooncake(setting: Setting) -> list[Row]:
    """Mooncake Store, by vLLM's own connector, beside ours."""
    return _beside(setting, "mooncake", "Mooncake Store over TCP", contenders.mooncake)


def _beside(
    setting: Setting,
    name: str,
    what: str,
    contender: Callable[[Setting], contextlib.AbstractContextManager[Contender]],
) -> list[Row]:
    with (
        contender(setting) as theirs,
        model(setting) as folder,
        contenders.node() as ours,
        _loader(setting, folder, theirs) as peer,
        _loader(setting, folder, ours) as own,
    ):
        setting.tell(f"{what} and ours, in turns")
        _in_turns((peer, own), setting.sizes.rounds)
    return [
        peer.times.row(setting.sizes, name, f"by {what}", bound=None),
        added(name, own.times, peer.times, what),
    ]


def _alone(
    setting: Setting, folder: str, contender: Contender, *, in_process: bool = False
) -> Times:
    with _loader(setting, folder, contender, in_process=in_process) as loader:
        for _ in range(setting.sizes.rounds):
            loader.turn()
    return loader.times


class _Loader:
    """An engine that loads, and what was measured with it."""

    def __init__(self, contender: Contender, process: GroupProcess, times: Times) -> None:
        self._processes = (*contender.polling, process)
        self._process = process
        self.times = times

    def turn(self) -> None:
        """Measure every prompt once."""
        self.times.add(self._process.tell("turn"))

    def stop(self) -> None:
        """Its processes take no more CPU time, until `resume`: vLLM's poll as well."""
        for process in reversed(self._processes):
            process.stop()

    def resume(self) -> None:
        """End a stop."""
        for process in self._processes:
            process.resume()


def _in_turns(loaders: Sequence[_Loader], rounds: int) -> None:
    """Measure each `rounds` times; meanwhile the others are stopped."""
    for loader in loaders:
        loader.stop()
    try:
        for _ in range(rounds):
            for loader in loaders:
                loader.resume()
                loader.turn()
                loader.stop()
    finally:
        for loader in loaders:
            loader.resume()


@contextlib.contextmanager
def _loader(
    setting: Setting, folder: str, contender: Contender, *, in_process: bool = False
) -> Iterator[_Loader]:
    """An engine that can load what an engine computed: another one, where they share anything."""
    sizes, times = setting.sizes, Times()
    options = EngineOptions(folder, contender.transfer, in_process, sizes.tokens + 64)
    with contextlib.ExitStack() as stack:

        def start() -> GroupProcess:
            started = stack.enter_context(engine(setting, options, contender.environment))
            started.tell("first_tokens", tokens=sizes.tokens, prompts=sizes.prompts)
            return started

        setting.tell("the engine that computes")
        process = start()
        times.computed(process.tell("compute"))
        if contender.shared:
            stack.close()
            setting.tell("the engine that loads")
            process = start()
        yield _Loader(contender, process, times)
