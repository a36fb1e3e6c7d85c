"""One vLLM prefills, another one decodes: the KV goes through the pool, the requests through a
gateway, which asks a conductor, which asks the engines and the node.

    python docs/examples/vllm/split.py

Exits with 1 if the decode instance computed a whole block of a prompt, the one that prefills found
something else than was counted on, or an answer is not the one of a single instance.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines import BLOCK_TOKENS, check_installed, node
from services import MODEL, Service, add, check_services, conductor, free_port, gateway, vllm
from tiny_model import make_model, make_prompt

if TYPE_CHECKING:
    from openai import OpenAI

TURNS, PAGE_TOKENS = 4, 128


@dataclass
class Answer:
    """The tokens of a streamed answer, the time to the first one, how many of the prompt's tokens
    the answering instance did not compute, the instances, how many cached tokens the conductor
    counted on, and the id by which it knows the request."""

    tokens: list[int]
    ttft_s: float
    cached: int
    instances: str
    expected: int
    id: str


def ask(client: OpenAI, prompt: list[int], **fields: str) -> Answer:
    """Stream a completion. `client` may be that of the gateway or of an instance."""
    began, ttft_s, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
    response = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
    )  # fmt: skip
    for event in response.parse():
        if event.choices:
            ttft_s = ttft_s or time.perf_counter() - began
            tokens += event.choices[0].token_ids or []
        elif event.usage and event.usage.prompt_tokens_details:
            cached = event.usage.prompt_tokens_details.cached_tokens or 0
    names = [response.headers.get(f"x-tiffin-{role}", "") for role in ("prefill", "decode")]
    expected = int(response.headers.get("x-tiffin-cached-tokens", "0"))
    id_ = response.headers.get("x-tiffin-request-id", "")
    return Answer(tokens, ttft_s, cached, " -> ".join(names), expected, id_)


def found(conducting: Service, request_id: str) -> int:
    """How many of the prompt's tokens the instance that prefills has found, as the conductor has
    heard."""
    from tiffin.conductor.client import ConductorClient

    with ConductorClient(conducting.url) as client:
        entry = client.why(request_id)
    return (entry.became and entry.became.found_tokens) or 0


def talk(split: OpenAI, alone: OpenAI, conducting: Service) -> bool:
    """A conversation: each prompt is all that was said, and a question. Returns whether answers and
    loads are as they should be."""
    print(
        "instances           prompt   counted on   found   loaded by decode       TTFT   alone   "
        "answers",
        flush=True,
    )
    prompt, good = make_prompt(1500, seed=1), True
    for turn in range(TURNS):
        answer = ask(split, prompt)
        # A salt of its own: this prompt shares nothing with another, so it is computed.
        whole = ask(alone, prompt, cache_salt=f"alone-{turn}")
        same = answer.tokens == whole.tokens
        good &= same and answer.cached == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        was_found = found(conducting, answer.id)
        good &= abs(was_found - answer.expected) <= PAGE_TOKENS
        print(
            f"{answer.instances} {len(prompt):8} {answer.expected:12} {was_found:7} "
            f"{answer.cached:18} "
            f"{1e3 * answer.ttft_s:7.0f} ms {1e3 * whole.ttft_s:4.0f} ms   "
            f"{'the same' if same else 'DIFFERENT'}",
            flush=True,
        )
        prompt = [*prompt, *answer.tokens, *make_prompt(700, seed=2 + turn)]
    return good


def main() -> int:
    """The exit status."""
    check_installed()
    check_services()
    from openai import OpenAI

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"127.0.0.1:{free_port()}"
        pool = stack.enter_context(node(folder, "--listen", address))
        model = make_model(folder)
        # Without prefix caches of their own: what they have, they have from the pool.
        alone = "--no-enable-prefix-caching"
        prefill = stack.enter_context(
            vllm("prefill", model, pool, "kv_both", alone, engine="prefill")
        )
        decode = stack.enter_context(
            vllm("decode", model, pool, "kv_consumer", alone, engine="decode")
        )
        conducting = stack.enter_context(conductor(folder, "--directory", f"tiffin://{address}"))
        print("two vLLMs start: half a minute", flush=True)
        for one in (prefill, decode, conducting):
            one.wait()
        for name, one in (("prefill", prefill), ("decode", decode)):
            add(conducting, name, one, name)
        door = stack.enter_context(gateway(folder, conducting))
        door.wait()
        split, whole = (OpenAI(base_url=f"{one.url}/v1", api_key="none") for one in (door, prefill))
        ask(split, make_prompt(1200, seed=0))  # warms up
        return 0 if talk(split, whole, conducting) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
