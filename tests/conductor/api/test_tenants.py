"""Request ids are per tenant: at the service, at several conductors, at the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from apisupport import MODEL, Recorder, spec_body
from clisupport import run as tiffin_conductor
from gatewaysupport import Engine, cluster, run, until
from serversupport import served
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import UnknownRequest
from tiffin.conductor.records import InstanceSpec, Rejection, Request, RequestEvent, Role
from tiffin.conductor.web.auth import load_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from httpx import Response

ID = "chat-1"
ALICE = {"authorization": "Bearer alice-key-0123456789", "x-request-id": ID}
BOB = {"authorization": "Bearer bob-key-0123456789012", "x-request-id": ID}


def ask(http: TestClient, tenant: str = "", tokens: int = 600, **more: Any) -> Response:
    body = {"request_id": ID, "model": MODEL, "prompt_tokens": tokens, "tenant": tenant, **more}
    return http.post("/v1/schedule", json=body)


def tell(http: TestClient, event: str, tenant: str = "") -> Response:
    return http.post(f"/v1/requests/{ID}/{event}", params={"tenant": tenant} if tenant else {})


class TestTheService:
    @pytest.fixture
    def http(self) -> Iterator[TestClient]:
        with TestClient(create_app(Recorder()), base_url="http://localhost") as http:
            for name in ("i1", "i2"):
                assert http.put(f"/v1/instances/{name}", json=spec_body()).status_code == 204
            yield http

    def test_another_tenants_id_is_free(self, http: TestClient) -> None:
        assert ask(http, "acme").status_code == 200
        assert ask(http, "evil", tokens=700).status_code == 200
        assert ask(http, tokens=800).status_code == 200, "nobody's, which is a third one"
        assert ask(http, "acme", tokens=700).status_code == 409, "its own is not"

    def test_nobody_ends_what_is_anothers(self, http: TestClient) -> None:
        """The same prompt with the same id from two tenants is two requests."""
        for tenant in ("acme", "evil"):
            assert ask(http, tenant).json()["request_id"] == ID
        assert tell(http, "cancelled", "evil").status_code == 204
        assert tell(http, "cancelled", "evil").status_code == 404
        assert tell(http, "first_token", "acme").status_code == 204

    def test_an_event_without_its_tenant_is_told_what_lacks(self, http: TestClient) -> None:
        assert ask(http, "acme").status_code == 200
        lost = tell(http, "finished")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "unknown_request")
        assert "?tenant=" in lost.json()["error"]["message"]

    @pytest.mark.parametrize("tenant", ["a/b", "a b", "/", "Ärzte", "t" * 1024, "acme/chat-1"])
    def test_whatever_a_tenant_is_called(self, http: TestClient, tenant: str) -> None:
        assert ask(http, tenant).status_code == 200
        assert ask(http, "acme").status_code == 200
        assert tell(http, "finished", tenant).status_code == 204
        assert tell(http, "first_token", "acme").status_code == 204
        found = http.get(f"/v1/decisions/{ID}/why", params={"tenant": tenant}).json()
        assert (found["tenant"], found["request_id"]) == (tenant, ID)

    def test_why_is_asked_of_a_tenants_request_or_of_the_latest(self, http: TestClient) -> None:
        for number, tenant in enumerate(("acme", "evil")):
            assert ask(http, tenant, tokens=600 + number).status_code == 200
        path = f"/v1/decisions/{ID}/why"
        assert http.get(path).json()["tenant"] == "evil"
        assert http.get(path, params={"tenant": "acme"}).json()["tenant"] == "acme"
        assert http.get(path, params={"tenant": "nobody"}).status_code == 404
        listed = http.get("/v1/decisions").json()["decisions"]
        assert [(one["tenant"], one["request_id"]) for one in listed] == [
            ("evil", ID), ("acme", ID),
        ]  # fmt: skip

    def test_why_goes_with_the_log(self, http: TestClient) -> None:
        """The id of a decision that has left the log finds nothing."""
        http.patch("/v1/policy", json={"core": {"log_max": 2}})
        assert ask(http, "acme").status_code == 200
        for number in range(2):
            assert ask(http, "evil", request_id=f"other-{number}").status_code == 200
        assert http.get(f"/v1/decisions/{ID}/why").status_code == 404


def test_clients_and_the_command_say_whose() -> None:
    core = Recorder()
    with served(core) as url, ConductorClient(url) as client:
        client.register(InstanceSpec("i1", MODEL, Role.MIXED, "test"))
        for tenant in ("acme", "evil"):
            placed = client.schedule(Request(ID, MODEL, 600, tenant=tenant))
            assert not isinstance(placed, Rejection)
        client.observe(RequestEvent(ID, "finished", tenant="evil"))
        client.observe(RequestEvent(ID, "first_token", tenant="acme"))
        with pytest.raises(UnknownRequest, match="tenant"):
            client.observe(RequestEvent(ID, "finished"))
        assert client.why(ID, tenant="acme").tenant == "acme"
        shown = tiffin_conductor("why", ID, "--tenant", "acme", "--url", url)
        assert "tenant acme" in shown.output


class TestTheGateway:
    @staticmethod
    def keys(tmp_path: Path) -> Any:
        path = tmp_path / "keys"
        path.write_text("schedule alice-key-0123456789\nschedule bob-key-0123456789012\n")
        path.chmod(0o600)
        return load_tokens(path)

    @pytest.mark.parametrize("claimed", [{}, {"x-tiffin-tenant": "acme"}])
    def test_an_id_in_flight_is_not_in_the_way_of_others(
        self, tmp_path: Path, claimed: dict[str, str]
    ) -> None:
        """Neither if clients are told apart by their keys, nor if both claim the same tenant."""

        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            async with cluster(engine, auth=self.keys(tmp_path)) as it:
                alice = {**ALICE, **claimed}
                async with it.stream({"prompt": "a lunch"}, headers=alice) as first:
                    assert first.status_code == 200
                    for prompt in ("another", "a lunch"):
                        bob = {**BOB, **claimed}
                        async with it.stream({"prompt": prompt}, headers=bob) as other:
                            assert other.status_code == 200
                    await until(lambda: it.core.kinds.count("cancelled") == 2)
                    engine.go.set()
                    text = "".join([piece async for piece in first.aiter_text()])
                assert "[DONE]" in text
                await it.idle()
                # Bob's requests were cancelled; the conductor got all events of Alice's.
                assert it.core.kinds.count("finished") == 1
                ids = [headers["x-request-id"] for _, _, headers in engine.calls
                       if "x-request-id" in headers]  # fmt: skip
                assert len(set(ids)) == 3, "engines, which know no tenants, see three ids"
                assert all("key" not in one and "acme" not in one for one in ids)

        run(scenario)

    def test_tenants_that_a_trusted_client_names_are_apart(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            async with cluster(engine) as it:
                one, other = ({"x-tiffin-tenant": name, "x-request-id": ID} for name in ("a", "b"))
                async with it.stream({"prompt": "a lunch"}, headers=one) as first:
                    async with it.stream({"prompt": "a dinner"}, headers=other) as second:
                        assert (first.status_code, second.status_code) == (200, 200)
                        assert first.headers["x-request-id"] == ID
                    engine.go.set()
                    await first.aread()
                await it.idle()

        run(scenario)

    def test_one_key_is_one_tenant(self, tmp_path: Path) -> None:
        """However its header is written: a client with several tenants would get several shares."""

        async def scenario() -> None:
            async with cluster(Engine("m0"), auth=self.keys(tmp_path)) as it:
                for scheme in ("Bearer ", "bearer ", "BEARER   "):
                    headers = {"authorization": f"{scheme}alice-key-0123456789"}
                    response = await it.post({"prompt": "a"}, headers=headers)
                    assert response.status_code == 200
                assert len({request.tenant for request in it.core.asked}) == 1

        run(scenario)
