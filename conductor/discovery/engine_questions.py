"""Asks engines over HTTP what they are and how busy they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.credentials import read_token

from ..client.http_session import HttpFailure, HttpSession, trusting
from ..errors import ConductorUnavailable, InvalidRequest
from .engine_facts import EngineAnswers, EngineFacts, read_facts
from .engine_metrics import EngineMetrics, read_metrics

if TYPE_CHECKING:
    import ssl

    from .settings import DiscoverySettings

# A vLLM with a hundred adapters has some hundred KB of metrics.
_ANSWER_BYTES_MAX = 4 << 20


class EngineQuestions:
    """For one event loop. Every question raises ConductorUnavailable if the engine does not answer
    in `timeout_s`, and InvalidRequest if it answers what no engine does. The constructor raises
    InvalidRequest and InvalidInput for a key or a CA that can't be read."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._timeout_s = settings.timeout_s
        self._http = HttpSession(key_headers(settings), tls_of(settings), settings.timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def metrics(self, url: str) -> EngineMetrics:
        """How busy it is."""
        return read_metrics(await self._metrics(url))

    async def facts(self, url: str) -> EngineFacts:
        """What it is. The routes that only one kind of engine has are asked for as well."""
        metrics = await self._metrics(url)
        models = await self._needed(url, "/v1/models")
        info = b""
        # vLLM's, in its development mode, and SGLang's, by its two names.
        for path in ("/server_info?config_format=json", "/get_server_info"):
            status, body = await self._get(url, path)
            if status == 200:
                info = body
                break
        status, version = await self._get(url, "/version")
        return read_facts(EngineAnswers(metrics, models, info, version if status == 200 else b""))

    async def _metrics(self, url: str) -> str:
        return (await self._needed(url, "/metrics")).decode("utf-8", "replace")

    async def _needed(self, url: str, path: str) -> bytes:
        status, body = await self._get(url, path)
        if status == 200:
            return body
        if status in (401, 403):
            raise InvalidRequest(
                f"{path} wants an API key ({status}): give the option api_key_file"
            )
        raise InvalidRequest(f"{path} answered {status}: is it an engine?")

    async def _get(self, url: str, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.send("GET", url + path, None, {})
                try:
                    return answer.status, await answer.read(_ANSWER_BYTES_MAX)
                finally:
                    answer.close()
        except HttpFailure as error:
            raise ConductorUnavailable(f"{path}: {error}") from error
        except TimeoutError as error:
            raise ConductorUnavailable(f"{path}: no answer in {self._timeout_s:g} s") from error


def key_headers(settings: DiscoverySettings) -> dict[str, str]:
    """The header with the engines' API key, if there is one. Raises InvalidInput."""
    if not settings.api_key_file:
        return {}
    key = read_token(Path(settings.api_key_file)).decode("latin-1")
    return {"authorization": f"Bearer {key}"}


def tls_of(settings: DiscoverySettings) -> ssl.SSLContext | None:
    """How engines that serve https are verified. Raises InvalidRequest."""
    return trusting(Path(settings.tls_ca)) if settings.tls_ca else None
