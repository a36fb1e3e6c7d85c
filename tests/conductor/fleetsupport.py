"""Real vLLMs of one model, each at a node of one pool, and a conductor that knows of them what they
tell and what they announce."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from directory.ports import free_port
from kvsupport import TIFFIN, wait_until
from serversupport import Process
from vllmsupport import MODEL, PATIENCE_S, Vllm, make_model

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import Request, RequestEvent
from tiffin.conductor.wire.models import DecisionReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
BLOCK, PAGE = 512, 128
NAMES = ("a", "b")
_numbers = itertools.count()


@dataclass
class Fleet:
    """The engines by the name of their instance; the nodes at which they are, as `tiffin up` tells
    of them; and the conductor at `url`."""

    engines: dict[str, Vllm]
    homes: dict[str, dict[str, Any]]
    pool_url: str
    conductor: ConductorClient
    url: str

    def decided(
        self, request_id: str, ids: list[int], *, adapter: str = "", salt: str = "", at: str = ""
    ) -> DecisionReply:
        """The decision of a prompt that may be computed nowhere but `at` that engine, if one is
        named."""
        others = tuple(name for name in self.engines if at and name != at)
        asked = Request(request_id, MODEL, len(ids), exclude=others)
        decision = self.conductor.schedule(
            asked,
            token_ids=ids,
            namespace=f"lora:{adapter}" if adapter else "",
            cache_salt=salt,
        )
        assert isinstance(decision, DecisionReply), decision
        return decision

    def known(self, ids: list[int], *, adapter: str = "", salt: str = "", at: str = "") -> int:
        """The tokens that would be found, by a decision that is taken back."""
        request_id = f"known-{next(_numbers)}"
        decision = self.decided(request_id, ids, adapter=adapter, salt=salt, at=at)
        self.conductor.observe_many([RequestEvent(request_id, "cancelled")])
        return decision.cached_tokens

    def wait_until_known(self, prompts: list[list[int]], **how: str) -> None:
        """Until all whole blocks of these prompts are predicted as found."""
        wait_until(
            lambda: all(self.known(ids, **how) >= len(ids) // BLOCK * BLOCK for ids in prompts),
            "all is saved, and known",
            PATIENCE_S,
        )

    def ask(
        self, ids: list[int], *, adapter: str = "", salt: str = "", at: str = ""
    ) -> tuple[str, int, int]:
        """Ask where the conductor says. Returns where, and the tokens predicted and found."""
        request_id = f"asked-{next(_numbers)}"
        decision = self.decided(request_id, ids, adapter=adapter, salt=salt, at=at)
        found = self.found_at(decision.prefill, ids, adapter=adapter, salt=salt)
        self.conductor.observe_many([RequestEvent(request_id, "finished")])
        return decision.prefill, decision.cached_tokens, found

    def found_at(
        self, engine: str, ids: list[int], *, adapter: str = "", salt: str = "", **more: Any
    ) -> int:
        """The tokens of a prompt that this engine finds, and need not compute."""
        body = {"model": adapter or MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, **more}
        body |= {"cache_salt": salt} if salt else {}
        reply = self.engines[engine].http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        details = reply.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0

    def start_again(self, *names: str, **extra: str) -> None:
        """Kill these engines, and start them with `extra` settings of the connector. Returns when
        the conductor counts on them."""
        for name in names:
            self.engines[name].kill_all()
        wait_until(
            lambda: not any(self._ready(name) for name in names), "they are gone", PATIENCE_S
        )
        for name in names:
            self.engines[name].later = _transfer(self.pool_url, self.homes[name], name, **extra)
            self.engines[name].start()
        for name in names:
            self.engines[name].wait()
        wait_until(lambda: all(self._ready(name) for name in names), "they are back", PATIENCE_S)

    def _ready(self, name: str) -> bool:
        (one,) = (one for one in self.conductor.instances() if one.id == name)
        return one.status == "ready" and bool(one.node) and one.keyed

    def holders(self, ids: list[int]) -> set[str]:
        """Who has all whole blocks of a prompt."""
        body = {"model": MODEL, "token_ids": ids}
        reply = httpx.post(f"{self.url}/v1/blocks/match", json=body, trust_env=False).json()
        return {one["holder"] for one in reply["holders"] if one["blocks"] == len(ids) // BLOCK}


@contextlib.contextmanager
def started_fleet(
    folder: Path,
    *options: str,
    nodes: int = 2,
    make: Callable[[Path], None] = make_model,
) -> Iterator[Fleet]:
    """Two engines with few pages, at a node each, or both at one; with these options of vLLM, of
    the model that `make` writes."""
    make(folder / "model")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_pool(nodes))
        homes = {name: pool["nodes"][at % nodes] for at, name in enumerate(NAMES)}
        engines = {}
        for name in NAMES:
            engines[name] = Vllm(
                *(name, folder / "model", "--enable-prompt-tokens-details", *options),
                *_transfer(pool["url"], homes[name], name),
            )
            stack.callback(engines[name].close)
            engines[name].start()
        for one in engines.values():
            one.wait()
        yield stack.enter_context(conducted(engines, homes, pool["url"]))


@contextlib.contextmanager
def conducted(
    engines: dict[str, Vllm], homes: dict[str, dict[str, Any]], pool_url: str
) -> Iterator[Fleet]:
    """These engines with a conductor that has just started, and has asked them."""
    url = f"http://127.0.0.1:{free_port()}"
    address, _, query = pool_url.partition("?")
    parameters = dict(part.split("=", 1) for part in query.split("&"))
    conductor = Process(
        *("--listen", url.removeprefix("http://")),
        *("--directory", f"{address}?password_file={parameters['password_file']}"),
        *("--pool-token-file", parameters["token_file"]),
    )
    with conductor, contextlib.closing(ConductorClient(url)) as client:
        conductor.wait_until_it_answers(url)
        for one in engines.values():
            one.add_to(client, PROFILE)
        wait_until(lambda: all(one.node for one in client.instances()), "nodes", PATIENCE_S)
        yield Fleet(engines, homes, pool_url, client, url)


def _transfer(pool_url: str, home: dict[str, Any], engine: str, **extra: str) -> tuple[str, str]:
    transfer = {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "url": f"{pool_url}&home={home['socket']}",
            "engine": engine,
            **extra,
        },
    }
    return "--kv-transfer-config", json.dumps(transfer)


@contextlib.contextmanager
def _pool(nodes: int) -> Iterator[dict[str, Any]]:
    """What `tiffin up` tells of its pool."""
    command = [*TIFFIN, "up", "--json", "--nodes", str(nodes), "--redis", "--dram", "256MiB"]
    path = os.pathsep.join([str(Path("build/links").resolve()), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as up:
        assert up.stdout is not None
        yield json.loads(up.stdout.readline())
        up.terminate()
