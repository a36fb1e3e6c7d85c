"""Follows the endpoints of a Kubernetes service through the API server, as a pod may whose service
account is allowed to `list` and `watch` `endpointslices` of `discovery.k8s.io`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from ..client.http_session import HttpFailure, HttpSession, trusting
from ..errors import ConductorUnavailable, InvalidRequest
from .endpoint_slices import EndpointSlices, Expired

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from ..client.http_session import HttpAnswer
    from .discovery import Place
    from .settings import KubernetesSettings, SourceSettings

# The server ends a watch after so long, and it is begun anew: a connection that broke without a
# word is noticed.
_WATCH_S = 240
_SPARE_S = 30.0
_BETWEEN_S = 0.5
_ANSWER_BYTES_MAX = 64 << 20  # a thousand slices of a hundred endpoints
_ANSWER_S = 30.0
_MISSING = "no pod of Kubernetes, or without a service account: give discovery.kubernetes"


class ApiServer:
    """An API server, and the account that asks it. Raises InvalidRequest if this is no pod, and the
    settings do not say either."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._folder = Path(settings.account_folder)
        self._url = (settings.api_url or _url_of_pod()).rstrip("/")
        self._http = HttpSession({}, self._tls(), _ANSWER_S)

    def _tls(self) -> ssl.SSLContext | None:
        if self._url.startswith("http://"):
            return None
        ca = self._folder / "ca.crt"
        return trusting(ca if ca.exists() else None)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def follow(self, source: SourceSettings) -> AsyncIterator[list[Place]]:
        """The endpoints of a service, whenever they change, for ever. Raises ConductorUnavailable
        when the server does not answer: ask again, after a pause; and InvalidRequest for what
        can't work."""
        path = self._path(source.kubernetes)
        while True:
            slices = EndpointSlices(source.scheme, source.port)
            slices.take_list(await self._list(path))
            yield slices.places()
            try:
                while True:
                    async for changed in self._watch(path, slices):
                        if changed:
                            yield slices.places()
                    await asyncio.sleep(_BETWEEN_S)
            except Expired:
                continue

    async def _list(self, path: str) -> bytes:
        async with asyncio.timeout(_ANSWER_S):
            answer = await self._get(path, {})
            try:
                return await answer.read(_ANSWER_BYTES_MAX)
            except HttpFailure as error:
                raise ConductorUnavailable(f"the API server: {error}") from error
            finally:
                answer.close()

    async def _watch(self, path: str, slices: EndpointSlices) -> AsyncIterator[bool]:
        """One watch until the server ends it: for each event, whether the slices have changed."""
        asked = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": slices.version,
            "timeoutSeconds": str(_WATCH_S),
        }
        answer = await self._get(path, asked)
        rest = b""
        try:
            while piece := await answer.piece():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _ANSWER_BYTES_MAX:
                    raise ConductorUnavailable("the API server: an event without an end")
                for line in filter(None, lines):
                    yield slices.take_event(line)
        except HttpFailure as error:
            raise ConductorUnavailable(f"the API server: {error}") from error
        finally:
            answer.close()

    async def _get(self, path: str, asked: dict[str, str]) -> HttpAnswer:
        url = f"{self._url}{path}&{urlencode(asked)}"
        silence_s = _WATCH_S + _SPARE_S if asked else _ANSWER_S
        try:
            # Read each time: the token of a pod ends after an hour, and a new one is put there.
            token = await asyncio.to_thread(self._token)
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = await self._http.send("GET", url, None, headers, silence_s)
        except HttpFailure as error:
            raise ConductorUnavailable(f"the API server: {error}") from error
        if answer.status == 200:
            return answer
        answer.close()
        if answer.status == 410:
            raise Expired(path)
        if answer.status in (401, 403):
            raise ConductorUnavailable(
                f"the API server answered {answer.status}: the service account has to be allowed "
                "to list and watch endpointslices of discovery.k8s.io there"
            )
        raise ConductorUnavailable(f"the API server answered {answer.status}")

    def _token(self) -> str:
        path = self._folder / "token"
        return path.read_text(encoding="ascii").strip() if path.exists() else ""

    def _path(self, where: str) -> str:
        namespace, _, service = where.rpartition("/")
        if not namespace:
            own = self._folder / "namespace"
            if not own.exists():
                raise InvalidRequest(f"{_MISSING}, and the source as NAMESPACE/SERVICE")
            namespace = own.read_text(encoding="utf-8").strip()
        label = quote(f"kubernetes.io/service-name={service}", safe="")
        return (
            f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
            f"?labelSelector={label}"
        )


def _url_of_pod() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host:
        raise InvalidRequest(_MISSING)
    return f"https://[{host}]:{port or 443}" if ":" in host else f"https://{host}:{port or 443}"
