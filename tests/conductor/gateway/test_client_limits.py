"""Objectives, rates, concurrency and quotas of clients: what is allowed, counted and told."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import typer
from apisupport import MODEL
from directory.ports import free_port
from gatewaysupport import CONFIG, Engine, cluster, run
from hypothesis import given
from hypothesis import strategies as st
from kvsupport import wait_until
from serversupport import GatewayProcess, served
from typer.testing import CliRunner

from tiffin.conductor.core import Conductor
from tiffin.conductor.gateway.cli import commands
from tiffin.conductor.gateway.clients.client_limits import ClientLimits
from tiffin.conductor.gateway.clients.client_settings import ClientSettings, ObjectiveBounds
from tiffin.conductor.gateway.clients.quota_file import QuotaFile
from tiffin.conductor.gateway.clients.token_bucket import TokenBucket
from tiffin.conductor.gateway.config import GatewayConfig, ModelConfig, needs_restart
from tiffin.conductor.records import Objectives
from tiffin.conductor.web.auth import Tokens, load_tokens
from tiffin.conductor.wire.answers import Refusal
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86_400.0


UNLIMITED = ClientSettings()


def limits(default: ClientSettings = UNLIMITED, **clients: ClientSettings) -> ClientLimits:
    return ClientLimits(clients, default, wall=lambda: 10 * DAY_S)


def refused(limit: str, call: Any, *arguments: Any) -> float:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    assert (caught.value.status, caught.value.param) == (429, limit)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


# -- objectives ------------------------------------------------------------------------------------


def test_stock_clients_are_protected_and_none_can_ask_for_less_or_for_too_much() -> None:
    bounds = ObjectiveBounds(ttft_s=2, ttft_min_s=0.5, ttft_max_s=10, tbt_max_s=0.1)
    assert bounds.within(Objectives()) == Objectives(2, 0.1)
    assert bounds.within(Objectives(0.001, 5)) == Objectives(0.5, 0.1)
    assert bounds.within(Objectives(3600, 0.05)) == Objectives(10, 0.05)
    assert ObjectiveBounds().within(Objectives(None, 1)) == Objectives(None, 1)
    with pytest.raises(ValueError, match="ttft_min_s <= ttft_s <= ttft_max_s"):
        ObjectiveBounds(ttft_s=3, ttft_max_s=2)


def test_classes_that_a_key_may_name() -> None:
    client = ClientSettings(priorities=("batch", "normal"))
    assert client.priority("") == "batch"
    assert client.priority("normal") == "normal"
    with pytest.raises(Refusal) as caught:
        client.priority("high")
    assert caught.value.status == 403
    assert ClientSettings().priority("high") == "high"
    assert ClientSettings().priority("") == "normal"


# -- rates -----------------------------------------------------------------------------------------


@given(
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200)), min_size=1, max_size=60),
    rate=st.floats(0.1, 50),
    size=st.floats(1, 100),
)
def test_a_bucket_gives_no_more_than_its_size_and_its_rate_and_one_request(
    steps: list[tuple[float, int]], rate: float, size: float
) -> None:
    bucket, now, taken = TokenBucket(rate, size, 0.0), 0.0, 0.0
    for pause_s, amount in steps:
        now += pause_s
        wait_s = bucket.wait_s(now)
        if wait_s > 0:
            now += wait_s
            assert bucket.wait_s(now) == 0.0, "whoever waits as told is let in"
        taken += amount
        bucket.take(amount, now)
        assert taken <= size + rate * now + amount + 1e-3


def test_a_request_that_is_larger_than_the_bucket_is_let_in_and_paid_for() -> None:
    one = limits(ClientSettings(tokens_per_minute=60, burst_s=10))
    visit = one.enter("a", 0.0)
    visit.prompt(1010, 0.0)
    visit.leave(60, 0.0)
    assert refused("tokens_per_minute", one.enter, "a", 1.0) == pytest.approx(1059, abs=1)
    one.enter("a", 1061.0)
    one.enter("b", 0.0)  # others pay for nothing


def test_requests_per_minute_and_at_a_time() -> None:
    one = limits(app=ClientSettings(requests_per_minute=2, concurrent_requests=1))
    first = one.enter("app", 0.0)
    assert refused("concurrent_requests", one.enter, "app", 0.0) == 1.0
    first.leave(0, 0.0)
    first.leave(0, 0.0)
    one.enter("app", 0.0).leave(0, 0.0)
    assert refused("requests_per_minute", one.enter, "app", 0.0) == 30.0
    one.enter("app", 31.0)
    assert one.totals["app", "requests"] == 3
    assert one.totals["app", "concurrent_requests"] == 1
    for _ in range(100):
        one.enter("nobody", 0.0)  # without settings


def test_a_prompt_that_finds_the_rate_used_up_is_refused() -> None:
    one = limits(ClientSettings(tokens_per_minute=60, burst_s=10))
    early, late = one.enter("a", 0.0), one.enter("a", 0.0)
    early.prompt(50, 0.0)
    assert refused("tokens_per_minute", late.prompt, 1, 0.0) == pytest.approx(40, abs=1)
    late.leave(0, 0.0)
    assert one.totals["", "prompt_tokens"] == 50


def test_other_settings_forgive_nothing() -> None:
    one = limits(ClientSettings(tokens_per_minute=600, burst_s=10))
    one.enter("a", 0.0).prompt(1000, 0.0)
    one.reload({}, ClientSettings(tokens_per_minute=6000, burst_s=10), 0.0)
    one.enter("a", 0.1)  # 100 - 900 + 900 more, and a tenth of a second
    one.reload({}, ClientSettings(tokens_per_minute=60, burst_s=10), 0.2)
    assert refused("tokens_per_minute", one.enter, "a", 0.2) > 800
    one.reload({}, ClientSettings(), 0.2)
    one.enter("a", 0.2)


# -- quotas ----------------------------------------------------------------------------------------


def test_quotas_end_at_midnight() -> None:
    now = [10 * DAY_S - 60]
    one = ClientLimits({}, ClientSettings(tokens_per_day=100), wall=lambda: now[0])
    visit = one.enter("a", 0.0)
    visit.prompt(90, 0.0)
    visit.leave(30, 0.0)
    assert refused("tokens_per_day", one.enter, "a", 0.0) == 60
    now[0] += 61
    one.enter("a", 0.0)


def test_a_quota_is_shared_by_processes_and_outlives_them(tmp_path: Path) -> None:
    settings, path = ClientSettings(requests_per_day=5), tmp_path / "quota"
    ours, theirs = limits(settings), limits(settings)
    for _ in range(3):
        ours.enter("a", 0.0)
        theirs.enter("a", 0.0)
    for one in (ours, theirs, ours):  # each learns what the others have granted
        file = QuotaFile(path)
        one.keep(one.day, file.add(one.day, one.spent()), 0.0)
        file.close()
    for one in (ours, theirs):
        refused("requests_per_day", one.enter, "a", 0.0)
    with closing(QuotaFile(path)) as file:
        assert file.add(11, {}) == {}  # another day


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    one = limits(ClientSettings(requests_per_day=5))
    one.enter("a", 0.0)
    one.unspend(one.spent())
    one.enter("a", 0.0)
    assert one.spent() == {"a": (2, 0)}
    with pytest.raises(InvalidInput, match="quota_file"):
        QuotaFile(tmp_path)
    file = QuotaFile(tmp_path / "quota")
    file.close()
    with pytest.raises(sqlite3.Error):
        file.add(1, {})


# -- the gateway -----------------------------------------------------------------------------------


def keys(path: Path, *lines: str) -> Tokens:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return load_tokens(path)


def as_client(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


APP, OTHER = "app-key-0123456789abcdef", "other-key-0123456789abcdef"


def test_each_key_has_its_limits_and_its_objectives(tmp_path: Path) -> None:
    tokens = keys(tmp_path / "keys", f"schedule,read,client:app {APP}", f"schedule {OTHER}")
    config = msgspec.structs.replace(
        CONFIG,
        models={MODEL: ModelConfig(tokenizer="estimate", objectives=ObjectiveBounds(tbt_s=0.5))},
        clients={
            "app": ClientSettings(
                requests_per_minute=2,
                objectives=ObjectiveBounds(ttft_s=60),
                priorities=("high",),
            )
        },
    )

    async def scenario() -> None:
        async with cluster(Engine("m0"), config=config, auth=tokens) as it:
            body = {"prompt": "abc", "max_tokens": 2}
            said = await it.post(body, headers=as_client(APP))
            assert said.status_code == 200, said.text
            assert said.headers["x-ratelimit-limit-requests"] == "2"
            assert said.headers["x-ratelimit-remaining-requests"] == "1"
            (asked,) = it.core.asked
            assert (asked.objectives, asked.priority) == (Objectives(60, 0.5), "high")
            wrong = {**as_client(APP), "x-tiffin-priority": "normal"}
            assert (await it.post(body, headers=wrong)).status_code == 403
            assert (await it.post(body, headers=as_client(APP))).status_code == 200
            said = await it.post(body, headers=as_client(APP))
            assert said.status_code == 429
            assert said.json()["error"]["code"] == "rate_limit_exceeded"
            assert said.json()["error"]["param"] == "requests_per_minute"
            assert int(said.headers["retry-after"]) >= 1
            other = await it.post(body, headers=as_client(OTHER))
            assert other.status_code == 200
            assert "x-ratelimit-limit-requests" not in other.headers
            await it.idle()
            text = it.gateway.metrics.text().decode()
            assert 'client_requests_total{client="app"} 2.0' in text
            assert 'client_limited_total{client="app",limit="requests_per_minute"} 1.0' in text
            assert 'client_tokens_total{client="other",of="answer"} 5.0' in text

    run(scenario)


def test_a_stream_is_charged_when_it_has_ended() -> None:
    config = msgspec.structs.replace(
        CONFIG, client_default=ClientSettings(tokens_per_minute=60, burst_s=4)
    )

    async def scenario() -> None:
        async with cluster(Engine("m0"), config=config) as it:
            body = {"prompt": [1], "max_tokens": 8}
            async with it.stream(body) as answer:
                assert answer.status_code == 200
                await answer.aread()
            await it.idle()
            said = await it.post(body)
            assert (said.status_code, said.json()["error"]["param"]) == (429, "tokens_per_minute")

    run(scenario)


def test_a_quota_that_was_used_up_before_a_restart(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        CONFIG,
        client_default=ClientSettings(requests_per_day=1),
        quota_file=str(tmp_path / "quota"),
    )

    async def scenario(status: int) -> None:
        async with cluster(Engine("m0"), config=config) as it:
            said = await it.post({"prompt": [1], "max_tokens": 1})
            assert said.status_code == status

    run(lambda: scenario(200))
    run(lambda: scenario(429))


def test_what_takes_a_restart() -> None:
    before = GatewayConfig(models={MODEL: ModelConfig()})
    objectives = ModelConfig(objectives=ObjectiveBounds(ttft_s=1))
    free = GatewayConfig(models={MODEL: objectives}, clients={"a": ClientSettings()})
    assert needs_restart(before, free) == []
    fixed = GatewayConfig(models={"another": ModelConfig()}, keepalive_s=1)
    assert needs_restart(before, fixed) == ["models", "keepalive_s"]


@pytest.mark.slow
def test_a_reload_of_a_running_gateway(tmp_path: Path) -> None:
    token_file, config = tmp_path / "keys", tmp_path / "gateway.toml"
    keys(token_file, f"schedule,read {APP}")
    config.write_text("refresh_s = 0.05\n")
    url = f"http://127.0.0.1:{free_port()}"

    def status(key: str) -> int:
        body = {"model": MODEL, "prompt": "a"}
        headers = as_client(key)
        said = httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False)
        return said.status_code

    with served(Conductor()) as conductor:
        listen = url.removeprefix("http://")
        options = ("--listen", listen, "--conductor", conductor, "--config", str(config))
        with GatewayProcess(*options, "--token-file", str(token_file)) as process:
            process.wait_until_it_answers(url)
            assert status(APP) == 503  # there is no instance
            assert status(OTHER) == 401
            keys(token_file, f"schedule,read,client:app {APP}", f"schedule {OTHER}")
            config.write_text("refresh_s = 0.1\n[clients.app]\nrequests_per_minute = 1\n")
            os.kill(process.process.pid, signal.SIGHUP)
            wait_until(lambda: status(OTHER) == 503, "the new key is known")
            wait_until(lambda: status(APP) == 429, "the new limit counts")
            config.write_text("[clients.app]\nrequests_per_minut = 100\n")
            os.kill(process.process.pid, signal.SIGHUP)
            wait_until(lambda: "requests_per_minut`" in process.log(), "the file is refused")
            assert status(APP) == 429
            status_code, log = process.end(signal.SIGTERM)
    assert status_code == 0
    assert "these take a restart: refresh_s" in log


# -- tiffin gateway check --------------------------------------------------------------------------


def check(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    commands(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["gateway", "check", *arguments])
    return result.exit_code, result.output


def test_check_says_all_that_is_wrong(tmp_path: Path) -> None:
    config, token_file = tmp_path / "gateway.toml", tmp_path / "keys"
    keys(token_file, f"schedule,client:mobile {APP}")
    config.write_text(
        f"""
        engine_token_file = "{tmp_path}/none"
        [models.m]
        schema_file = "{tmp_path}/nowhere"
        [clients.app]
        tokens_per_day = 1000
        [clients.app.objectives]
        ttft_s = 2
        """
    )
    code, said = check(str(config), "--token-file", str(token_file))
    assert code == 1
    for part in (
        "models.m: can't read a schema",
        "engine_token_file: can't read",
        "quotas per day begin anew",
        "no key of the token file is named client:app",
        "client:mobile of the token file has no settings",
        "ttft_s 2",
    ):
        assert part in said, said
    for content, place in (
        ("[clients.app]\ntokens_per_minut = 3", "`clients.app`"),
        ("[clients.'a b'.objectives]\nttft_s = 'x'", "`clients.a b.objectives.ttft_s`"),
        ("[models.m]\n[models.n]\nkeys = 3", "`models.n.keys`"),
        ("[timeouts]\nstop_s = 'x'", "`$.timeouts.stop_s`"),
        ("refresh_s = \n", "line 1"),
    ):
        config.write_text(content)
        code, said = check(str(config))
        assert code == 1, said
        assert place in said, said
    assert check(str(tmp_path / "absent.toml"))[0] == 1
    config.write_text("[models.m.objectives]\nttft_s = 3")
    assert check(str(config)) == (0, check(str(config))[1])


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("", None),
        ('[default]\nkeys = "gateway"', "default"),
        ('[models.m]\nkeys = "gateway"', "models.m"),
        ('[models.m]\nkeys = "conductor"', None),
        ('[models.m]\nkeys = "none"', None),
    ],
)
def test_check_warns_of_models_without_keys(tmp_path: Path, text: str, model: str | None) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(text)
    code, said = check(str(config))
    assert code == 0
    found = [line for line in said.splitlines() if "placed by load alone" in line]
    wanted = f"warning: {model}: without a schema_file the gateway makes no keys"
    assert len(found) == (model is not None)
    assert all(line.startswith(wanted) for line in found)


def test_names_of_clients_in_the_token_file(tmp_path: Path) -> None:
    tokens = keys(tmp_path / "keys", f"read,client:a-b {APP}")
    grant = tokens.grant(APP.encode())
    assert grant is not None
    assert grant.client == "a-b"
    assert str(grant) == "read"
    for line in (f"client:a {APP}", f"read,client: {APP}", f"read,client:a,client:b {APP}"):
        with pytest.raises(InvalidInput, match="line 1: write RIGHTS TOKEN"):
            keys(tmp_path / "keys", line)
