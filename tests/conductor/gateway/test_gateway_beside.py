"""`handoff = "stream"`: the decode instance is asked together with the prefill. The engines are
stubs; tests/conductor/gateway/test_split_vllm.py has real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gatewaysupport import MODEL, Engine, changed, cluster, run, until

from tiffin.conductor.gateway.config import ModelConfig
from tiffin.conductor.records import Role

SPLIT: dict[str, Any] = {"disaggregation": {"form": "remote", "layerwise_tokens_min": 0}}
WHOLE: dict[str, Any] = {"disaggregation": {"form": "remote", "layerwise_tokens_min": 512}}
CONFIG = changed(models={MODEL: ModelConfig(handoff="stream")}, reschedules=0)
PROMPT = "Where does the lunch of Mumbai come from, and who carries it?"
ASKED: dict[str, Any] = {"prompt": PROMPT, "stream": True, "max_tokens": 64}


def engines(**decode: Any) -> tuple[Engine, Engine]:
    prefill = Engine("p0", Role.PREFILL)
    prefill.compute.clear()
    return prefill, Engine("d0", Role.DECODE, **decode)


@pytest.mark.parametrize("stream", [False, True])
def test_both_are_asked_at_once(stream: bool) -> None:
    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        async with cluster(prefill, decode, settings=SPLIT, config=CONFIG) as it:
            answer = asyncio.create_task(it.post({**ASKED, "stream": stream}))
            await until(lambda: bool(prefill.completions and decode.completions))
            assert prefill.completions[0]["kv_transfer_params"] == {"tiffin": {}}
            assert decode.completions[0]["kv_transfer_params"] == {"tiffin": {"prefilling": True}}
            prefill.compute.set()
            await until(lambda: it.core.kinds == ["prefill_done"])
            decode.go.set()
            assert (await answer).status_code == 200
            await it.idle()
            assert it.core.kinds[-1] == "finished"

    run(scenario)


def test_what_the_conductor_sends_in_one_piece_is_decoded_after_its_prefill() -> None:
    async def scenario() -> None:
        prefill, decode = engines()
        async with cluster(prefill, decode, settings=WHOLE, config=CONFIG) as it:
            answer = asyncio.create_task(it.post(ASKED))
            await until(lambda: bool(prefill.completions))
            prefill.compute.set()
            assert (await answer).status_code == 200
            assert it.core.kinds[0] == "prefill_done"
            assert decode.completions[0]["kv_transfer_params"] == {"tiffin": {"blocks": 1}}

    run(scenario)


def test_what_a_prefill_said_of_its_node_is_told_with_the_next_prompt() -> None:
    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        prefill.stored = {"blocks": 1, "node": 3}
        prefill.compute.set()
        async with cluster(prefill, decode, settings=SPLIT, config=CONFIG) as it:
            for number in range(1, 3):
                decode.go.clear()
                answer = asyncio.create_task(it.post(ASKED))
                await until(lambda count=number: it.core.kinds.count("prefill_done") == count)
                decode.go.set()
                assert (await answer).status_code == 200
            told = [body["kv_transfer_params"]["tiffin"] for body in decode.completions]
            assert told == [{"prefilling": True}, {"prefilling": True, "node": 3}]

    run(scenario)


def test_a_refusal_of_the_prefill_is_the_answer_and_the_other_is_aborted() -> None:
    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        prefill.status = 400
        async with cluster(prefill, decode, settings=SPLIT, config=CONFIG) as it:
            assert (await it.post(ASKED)).status_code == 400
            await it.idle()
            await until(lambda: decode.aborted == len(decode.completions))

    run(scenario)


def test_a_prefill_that_dies_ends_the_other_and_both_are_asked_elsewhere() -> None:
    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        prefill.die_at = -1
        prefill.compute.set()
        second = Engine("p1", Role.PREFILL)
        config = changed(models=CONFIG.models, reschedules=1)
        async with cluster(prefill, decode, second, settings=SPLIT, config=config) as it:
            answer = asyncio.create_task(it.post(ASKED))
            await until(lambda: len(decode.completions) == 2)
            await until(lambda: decode.aborted == 1)
            decode.go.set()
            response = await answer
            assert response.status_code == 200
            assert response.headers["x-tiffin-prefill"] == "p1"

    run(scenario)


def test_an_answer_that_is_there_first_does_not_wait_for_the_prefill() -> None:
    """The decode instance had the blocks, or has computed them."""

    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        async with cluster(prefill, decode, settings=SPLIT, config=CONFIG) as it:
            answer = asyncio.create_task(it.post(ASKED))
            await until(lambda: bool(prefill.completions))
            decode.go.set()
            response = await answer
            assert response.status_code == 200
            assert response.content == decode.sent
            await until(lambda: prefill.aborted == 1)
            await it.idle()
            assert it.core.kinds[0] == "first_token"
            assert it.core.statistics()["in_flight"] == 0

    run(scenario)


def test_a_client_that_leaves_ends_both() -> None:
    async def scenario() -> None:
        prefill, decode = engines(hold_at=0)
        async with cluster(prefill, decode, settings=SPLIT, config=CONFIG) as it:
            answer = asyncio.create_task(it.post(ASKED))
            await until(lambda: bool(prefill.completions and decode.completions))
            answer.cancel()
            await until(lambda: (prefill.aborted, decode.aborted) == (1, 1))
            await it.idle()

    run(scenario)
