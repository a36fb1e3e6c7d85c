"""Whole vLLM engines on the pool say, token for token, what they say without it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import vllm
from generationsupport import Answer, Engine, Turn, converse, loadable, spoil, transfer
from kvsupport import wait_until
from vllm.v1.core.sched.scheduler import Scheduler

from tiffin.kvstore.connectors.vllm.pages.page_copier import PageCopier
from tiffin.kvstore.connectors.vllm.worker_side import WorkerSide
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)

# Models and settings that decide an answer's numbers; others must not.
KINDS: dict[str, tuple[str, str]] = {
    "llama": ("llama", "float32"),
    "llama-other": ("llama-other", "float32"),
    "llama-bfloat16": ("llama", "bfloat16"),
    "qwen2": ("qwen2", "float32"),
}


@pytest.fixture(scope="module")
def script(model_folders: Path) -> Callable[[str], list[Turn]]:
    """A function that has the conversations with an engine of a kind that has no pool."""
    scripts: dict[str, list[Turn]] = {}

    def script(kind: str) -> list[Turn]:
        if kind not in scripts:
            model, dtype = KINDS[kind]
            with Engine(model_folders / model, dtype=dtype) as engine:
                scripts[kind] = converse(engine, seed=1)
        return scripts[kind]

    return script


@pytest.fixture
def start(model_folders: Path, shared_node: Daemon, namespace: str) -> Callable[..., Engine]:
    """A function that starts an engine of a kind on the pool. `settings`: the connector's; the
    others are vLLM's."""

    def start(
        kind: str = "llama",
        *,
        url: str = shared_node.url,
        policy: str = "recompute",
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Engine:
        model, dtype = KINDS[kind]
        pool = transfer(url, namespace, policy, **(settings or {}))
        return Engine(model_folders / model, pool, dtype=dtype, **changes)

    return start


Start: TypeAlias = "Callable[..., Engine]"
Script: TypeAlias = "Callable[[str], list[Turn]]"


# -- loading and storing ---------------------------------------------------------------------------


def test_a_fresh_engine_loads_what_another_stored(start: Start, script: Script) -> None:
    turns = script("llama")
    with start(enable_prefix_caching=False) as engine:
        engine.play(turns)
    for loading in ("synchronous", "asynchronous", "auto"):
        with start(enable_prefix_caching=False, settings={"loading": loading}) as engine:
            cached = engine.play(turns)
        assert cached == [loadable(prompt) for turn in turns for prompt in turn.prompts]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pages-of-32": ("llama", {"block_size": 32}),
    "pages-of-64": ("llama", {"block_size": 64, "enable_prefix_caching": False}),
    "chunked-prefill": ("llama", {"max_num_batched_tokens": 256, "block_size": 64}),
    "whole-prefill": ("llama", {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}),
    "bfloat16": ("llama-bfloat16", {}),
    "qwen2": ("qwen2", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pool_changes_no_token(start: Start, script: Script, variant: str) -> None:
    kind, changes = VARIANTS[variant]
    turns = script(kind)
    with start(kind, **changes) as engine:
        engine.play(turns)
    with start(kind, **changes) as engine:
        cached = engine.play(turns)
    prompts = [prompt for turn in turns for prompt in turn.prompts]
    for tokens, prompt in zip(cached, prompts, strict=True):
        assert tokens >= loadable(prompt)  # more, where it has them itself


LAYERWISE = {"layerwise": "always", "loading": "synchronous"}


def slow_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make each layer's copy take longer than the layer; returns how many were copied beside each
    forward pass."""
    scatter_layers, steps = PageCopier.scatter_layers, list[int]()

    def slow(copier: PageCopier, loads: Any) -> Iterator[tuple[int, None]]:
        steps.append(0)
        copies = scatter_layers(copier, loads)
        while True:
            time.sleep(0.02)
            step = next(copies, None)
            if step is None:
                return
            steps[-1] += 1
            yield step

    monkeypatch.setattr(PageCopier, "scatter_layers", slow)
    return steps


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_loads_beside_the_forward_pass_change_no_token(
    start: Start, script: Script, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = script(kind)
    with start(kind, enable_prefix_caching=False) as engine:
        engine.play(turns)
    steps = slow_layers(monkeypatch)
    with start(kind, enable_prefix_caching=False, settings=LAYERWISE) as engine:
        cached = engine.play(turns)
        layers = len(engine.connector._layers)
    assert cached == [loadable(prompt) for turn in turns for prompt in turn.prompts]
    assert steps
    assert set(steps) == {layers}


def test_an_engine_ends_whose_layers_do_not_wait_for_their_loads(
    start: Start, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = script("llama")
    with start(enable_prefix_caching=False) as engine:
        engine.play(turns)
    slow_layers(monkeypatch)
    monkeypatch.setattr(WorkerSide, "wait_for_layer", lambda *_: None)
    with (
        start(enable_prefix_caching=False, settings=LAYERWISE) as engine,
        pytest.raises(RuntimeError, match="did not wait for the loads of model"),
    ):
        engine.play(turns)  # those of the first step are asynchronous


def test_preempted_requests_say_what_they_would_have_said(
    start: Start, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    preempt = Scheduler._preempt_request

    def noted(self: Scheduler, request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", noted)
    few = {"kv_cache_memory_bytes": 7 << 20, "max_model_len": 3200, "block_size": 32}
    for _ in range(2):  # what is stored, and what is loaded
        with start(enable_prefix_caching=False, **few) as engine:
            engine.play(script("llama"))
    assert preempted


def test_a_salt_keeps_requests_apart(start: Start, script: Script) -> None:
    (turn, *_) = script("llama")
    with start(enable_prefix_caching=False) as engine:
        cached = []
        for salt in ("one", "other", "one"):
            answers = engine.generate(turn.prompts, salt)
            assert [answer.tokens for answer in answers] == turn.said
            cached.append([answer.cached for answer in answers])
    expected = [loadable(prompt) for prompt in turn.prompts]
    assert cached == [[0] * 4, [0] * 4, expected]


def test_another_model_never_reads_these_blocks(start: Start, script: Script) -> None:
    turns = script("llama")
    with start() as engine:
        engine.play(turns)
    with start("llama-other", enable_prefix_caching=False) as engine:
        answers = engine.generate(turns[0].prompts)
    assert not any(answer.cached for answer in answers)
    assert [answer.tokens for answer in answers] == script("llama-other")[0].said


# -- damage and death ------------------------------------------------------------------------------


def test_spoilt_blocks_change_the_answers_of_nobody_who_verifies(
    start: Start, script: Script, node: Daemon
) -> None:
    (turn, *_) = script("llama")
    with start(url=node.url) as engine:
        engine.play([turn])
        spoil(engine, node.url, turn.prompts)
    with start(url=node.url, settings={"verify": "off"}) as engine:
        answers = engine.generate(turn.prompts)
    assert [answer.tokens for answer in answers[:3]] != turn.said[:3]  # they are really read
    with start(url=node.url, settings={"verify": "always"}) as engine:
        engine.play([turn])


def run_steps(engine: Engine, steps: int) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for _ in range(steps):
        answers |= engine.step()
    return answers


@pytest.mark.parametrize("caching", [True, False], ids=["asynchronous", "synchronous"])
def test_requests_outlive_their_node(
    start: Start, script: Script, node: Daemon, caching: bool
) -> None:
    first, second, _ = script("llama")
    loading = "asynchronous" if caching else "synchronous"
    with start(
        url=node.url, settings={"loading": loading}, enable_prefix_caching=caching
    ) as engine:
        engine.play([first])
        engine.start(second.prompts)
        answers = run_steps(engine, 2)
        node.kill()
        answers |= run_steps(engine, 5)
        node.start()
        answers |= engine.finish()
        assert [answers[str(index)].tokens for index in range(4)] == second.said
        await_connection(engine)
        engine.play([first, second])


def await_connection(engine: Engine) -> None:
    """Return when the engine has its pool again: it asks after a rest, when something is to do."""

    def connected() -> bool:
        try:
            engine.connector._scheduler._link.call(lambda client: None)
        except NodeUnavailable:
            return False
        return True

    wait_until(connected, "the engine has its pool", 60.0)


def test_an_engine_that_starts_before_its_node_uses_it_once_it_is_there(
    start: Start, script: Script, node: Daemon
) -> None:
    (turn, *_) = script("llama")
    node.kill()
    with start(url=node.url, enable_prefix_caching=False) as engine:
        assert engine.play([turn]) == [0, 0, 0, 0]
        node.start()
        await_connection(engine)
        engine.play([turn])
        cached = engine.play([turn])
    assert cached == [loadable(prompt) for prompt in turn.prompts]


# -- refusals --------------------------------------------------------------------------------------


def test_an_unknown_release_of_vllm_is_refused_by_name(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(InvalidInput, match=r"vLLM 0\.99\.1"):
        start()


def test_an_unknown_setting_is_refused_by_name(start: Start) -> None:
    with pytest.raises(InvalidInput, match="hurry"):
        start(settings={"hurry": True})
