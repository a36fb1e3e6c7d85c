"""What OpenAI's own client makes of the gateway's refusals, limits and broken streams. Its answers
with a real vLLM: `test_openai_client_vllm.py`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from apisupport import MODEL
from gatewaysupport import CONFIG, Cluster, Engine, changed, cluster, run

from tiffin.conductor.gateway.clients.client_settings import ClientSettings
from tiffin.conductor.web.auth import load_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY, READER = "a-secret-key-of-this-app", "a-secret-key-of-readers"


@asynccontextmanager
async def client_of(it: Cluster, key: str = KEY, retries: int = 0) -> AsyncIterator[Any]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    url = str(it.http.base_url.join("/v1"))
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, http_client=http, max_retries=retries
    ) as made:
        yield made


async def ask(client: Any, **more: Any) -> Any:
    return await client.completions.create(model=MODEL, **{"prompt": [1, 2, 3], **more})


def test_keys_and_their_rights(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"schedule,read {KEY}\nread {READER}\n")
    keys.chmod(0o600)

    async def scenario() -> None:
        async with cluster(Engine("m0"), config=CONFIG, auth=load_tokens(keys)) as it:
            async with client_of(it, "none") as client:
                with pytest.raises(openai.AuthenticationError) as wrong:
                    await ask(client)
                assert wrong.value.status_code == 401
            async with client_of(it, READER) as client:
                assert [one.id async for one in client.models.list()] == [MODEL]
                with pytest.raises(openai.PermissionDeniedError):
                    await ask(client)
            async with client_of(it) as client:
                assert (await ask(client)).choices[0].text == "".join(Engine("").answer)

    run(scenario)


@pytest.mark.slow
def test_a_rate_is_one_that_the_client_waits_for() -> None:
    """With retries, it comes again as `Retry-After` says."""
    settings = ClientSettings(requests_per_minute=60, burst_s=1)

    async def scenario() -> None:
        engine = Engine("m0")
        async with cluster(engine, config=changed(client_default=settings)) as it:
            async with client_of(it) as client:
                await ask(client)
                with pytest.raises(openai.RateLimitError) as limited:
                    await ask(client)
                assert limited.value.code == "rate_limit_exceeded"
                assert limited.value.response.headers["retry-after"] == "1"
            async with client_of(it, retries=5) as client:
                await ask(client)
            assert len(engine.completions) == 2

    run(scenario)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_breaks_is_an_exception(chat: bool) -> None:
    async def scenario() -> None:
        async with cluster(Engine("m0", die_at=2)) as it, client_of(it) as client:
            texts: list[str] = []

            async def read() -> None:
                if chat:
                    messages = [{"role": "user", "content": "a"}]
                    calls = client.chat.completions
                    events = await calls.create(model=MODEL, messages=messages, stream=True)
                else:
                    events = await ask(client, stream=True)
                async for event in events:
                    choice = event.choices[0]
                    texts.append(choice.delta.content if chat else choice.text)

            with pytest.raises(openai.APIError) as broken:
                await read()
            assert texts == ["Dabba", "wal"]
            assert broken.value.code == "engine_failed"
            assert not isinstance(broken.value, openai.APIStatusError)

    run(scenario)


@pytest.mark.parametrize("dies", [True, False])
def test_a_request_that_ends_instances_is_not_sent_again(dies: bool) -> None:
    """Clients try again after what looks like a failure of the server, with two instances each."""
    what: dict[str, Any] = {"die_at": -1} if dies else {"status": 500}

    async def scenario() -> None:
        engines = [Engine(f"m{n}", **what) for n in range(4)]
        async with cluster(*engines, config=CONFIG) as it, client_of(it, retries=3) as client:
            with pytest.raises(openai.InternalServerError) as poisonous:
                await ask(client)
            assert poisonous.value.response.headers["x-should-retry"] == "false"
            assert sum(len(one.completions) for one in engines) == 2

    run(scenario)


def test_what_no_instance_can_answer() -> None:
    async def scenario() -> None:
        async with cluster(Engine("m0", status=503)) as it, client_of(it) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await ask(client)
            assert failed.value.code == "no_instance"
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="none", prompt="a")
            assert unknown.value.code == "unknown_model"
            with pytest.raises(openai.NotFoundError) as nowhere:
                await client.images.generate(prompt="a")
            assert nowhere.value.code == "no_such_route"

    run(scenario)
