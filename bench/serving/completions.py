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
    instances, and the id by which the conductor knows the request, "" without a gateway; how many
    cached tokens the conductor expected, and the engine found, if it says so."""

    tokens: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    request_id: str = ""
    cached_tokens: int = 0
    found_tokens: int = 0


class Refused(ProcessFailed):
    """The conductor did not take the request."""


def ask(
    server: Server,
    prompt: Sequence[int],
    answer_tokens: int,
    name: str,
    ttft_s: float | None = None,
    **fields: Any,
) -> Answer:
    """Stream a completion; `name` is a label of the request, `ttft_s` its objective. Raises
    ProcessFailed, and Refused if a conductor refuses it."""
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
    asked = {"x-request-id": name}
    if ttft_s is not None:
        asked["x-tiffin-ttft-ms"] = str(round(1e3 * ttft_s))
    began = time.perf_counter()
    try:
        with server.http.stream("POST", "/v1/completions", json=body, headers=asked) as response:
            headers = response.headers
            if response.status_code != 200:
                text = response.read().decode(errors="replace")
                kind = Refused if "x-tiffin-reject-reason" in headers else ProcessFailed
                raise kind(f"{server.name} answers {response.status_code}: {text[:500]}")
            answer = Answer(**{role: headers.get(f"x-tiffin-{role}", "") for role in _ROLES})
            answer.request_id = headers.get("x-tiffin-request-id", "")
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
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    answer.found_tokens = details.get("cached_tokens") or answer.found_tokens
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            answer.tokens += choice["token_ids"]
            answer.arrivals_s.append(now_s)
