"""Streamed completions of token ids, as a client of the gateway or of a vLLM measures them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from .errors import ProcessFailed
from .servers import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .servers import Server

_ROLES = ("prefill", "decode")


@dataclass(slots=True)
class Answer:
    """The tokens of an answer; seconds from the request to each event with tokens; the names of the
    instances, "" without a gateway; how many cached tokens the conductor expected."""

    tokens: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0


def ask(
    server: Server, prompt: Sequence[int], answer_tokens: int, name: str, **fields: Any
) -> Answer:
    """Stream a completion; `name` is the request's id. Raises ProcessFailed."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    began = time.perf_counter()
    try:
        with server.http.stream(
            "POST", "/v1/completions", json=body, headers={"x-request-id": name}
        ) as response:
            if response.status_code != 200:
                text = response.read().decode(errors="replace")
                raise ProcessFailed(f"{server.name} answers {response.status_code}: {text[:500]}")
            headers = response.headers
            answer = Answer(**{role: headers.get(f"x-tiffin-{role}", "") for role in _ROLES})
            answer.cached_tokens = int(headers.get("x-tiffin-cached-tokens", "0"))
            for line in response.iter_lines():
                _read(line, answer, time.perf_counter() - began)
    except httpx.TransportError as error:
        server.look()
        raise ProcessFailed(f"{server.name} broke off: {type(error).__name__}: {error}") from error
    if len(answer.tokens) != answer_tokens:
        raise ProcessFailed(f"{server.name} sent {len(answer.tokens)} of {answer_tokens} tokens")
    return answer


def _read(line: str, answer: Answer, now_s: float) -> None:
    if not line.startswith("data: {"):
        return
    event = msgspec.json.decode(line.removeprefix("data: "))
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            answer.tokens += choice["token_ids"]
            answer.arrivals_s.append(now_s)
