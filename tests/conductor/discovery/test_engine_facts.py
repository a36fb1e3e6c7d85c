"""What engines answer is what is registered: by texts that a real vLLM gave, and SGLang's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginesupport import METRICS, MODELS, server_info

from tiffin.conductor.discovery.engine_facts import (
    EngineAnswers,
    EngineFacts,
    own_schema,
    read_facts,
    registration,
)
from tiffin.conductor.discovery.engine_metrics import read_metrics
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import InstanceSpec, Load, Role
from tiffin.conductor.wire.engine_models import EngineOptions

URL = "http://10.0.0.21:8000"
PROFILE = EngineOptions(profile="llama-3.1-8b.h100.tp1.vllm")
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 2.0
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 1234.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.01
"""
SGLANG_INFO = {
    "version": "0.5.23",
    "page_size": 64,
    "max_total_num_tokens": 120_000,
    "max_running_requests": 48,
    "disaggregation_mode": "prefill",
    "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}',
}


def facts(metrics: str = METRICS, models: bytes = MODELS, info: Any = None) -> EngineFacts:
    body = b"" if info is None else json.dumps(info).encode()
    return read_facts(EngineAnswers(metrics, models, body, b'{"version":"0.32.0"}'))


def registered(found: EngineFacts, options: EngineOptions = PROFILE) -> InstanceSpec:
    return registration(found, options, URL, "pod-7", None)[0]


def test_a_vllm_as_it_is_started_by_default() -> None:
    found = facts()
    assert (found.metrics.engine, found.version) == ("vllm", "0.32.0")
    spec, schema = registration(found, PROFILE, URL, "pod-7", None)
    assert (spec.id, spec.model, spec.role, spec.url) == ("pod-7", "tiny", Role.MIXED, URL)
    assert (spec.part_tokens, spec.block_tokens, spec.kv_capacity_tokens) == (128, 512, 6144)
    assert (spec.batch_max, spec.fetches, spec.labels) == (256, False, {})
    assert schema == own_schema("tiny", 512)


def test_a_vllm_in_its_development_mode_tells_more() -> None:
    info = server_info(live=5557, replay=5558, role="kv_producer")
    spec = registered(facts(info=info))
    assert (spec.role, spec.batch_max) == (Role.PREFILL, 4)
    assert spec.labels == {
        "kv_events": "tcp://10.0.0.21:5557",
        "kv_events_replay": "tcp://10.0.0.21:5558",
    }


def test_an_sglang() -> None:
    found = facts(SGLANG, info=SGLANG_INFO)
    spec = registered(found)
    assert (spec.role, spec.kv_capacity_tokens, spec.batch_max) == (Role.PREFILL, 120_000, 48)
    assert spec.labels == {"kv_events": "tcp://10.0.0.21:5557", "kv_events_topic": "kv"}
    assert found.metrics.load(120_000) == Load(queued=2, running=3, kv_used_tokens=1234)
    # Behind some exporters names have no colon.
    assert read_metrics(SGLANG.replace("sglang:", "sglang_")) == found.metrics


def test_load_is_counted_over_ranks() -> None:
    two = "".join(
        f'vllm:num_requests_running{{engine="{rank}"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{rank}"}} {rank}\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}\n'
        for rank, running, usage in ((0, 5.0, 0.5), (1, 2.0, 0.1))
    )
    found = read_metrics(two)
    assert found.ranks == 2
    assert found.load(1000) == Load(queued=1, running=7, kv_used_tokens=300)


def test_numbers_that_are_none_are_unknown() -> None:
    found = read_metrics("vllm:num_requests_running 1\nvllm:num_requests_waiting NaN\n")
    assert found.load(1000) == Load(running=1)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"profile": ""}, "profile"),
        ({"model": "other"}, "option model is 'other', and it serves 'tiny'"),
        ({"block_tokens": 200}, "block_tokens"),
    ],
)
def test_what_it_does_not_tell_is_an_option_that_the_error_names(
    changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(InvalidRequest, match=option):
        registered(facts(), EngineOptions(**({"profile": "p"} | changes)))


def test_a_capacity_that_is_not_told_is_asked_for() -> None:
    metrics = "\n".join(line for line in METRICS.splitlines() if "cache_config_info" not in line)
    with pytest.raises(InvalidRequest, match="KV cache holds: give the option kv_capacity_tokens"):
        registered(facts(metrics))
    given = EngineOptions(profile="p", kv_capacity_tokens=9000)
    assert registered(facts(metrics), given).kv_capacity_tokens == 9000


def test_options_count_more_than_what_it_tells() -> None:
    options = EngineOptions(
        id="mine", profile="p", role="decode", kv_capacity_tokens=5, batch_max=7,
        block_tokens=256, kv_events_port=1111, kv_events_replay_port=2222, kv_events_topic="t",
    )  # fmt: skip
    spec = registered(facts(info=server_info(live=5557, replay=5558)), options)
    assert (spec.id, spec.role, spec.kv_capacity_tokens) == ("mine", Role.DECODE, 5)
    assert (spec.batch_max, spec.block_tokens) == (7, 256)
    assert list(spec.labels.values()) == ["tcp://10.0.0.21:1111", "tcp://10.0.0.21:2222", "t"]


def test_the_index_has_blocks_that_the_engine_s_divide() -> None:
    odd = METRICS.replace('block_size="128"', 'block_size="528"', 1)
    assert registered(facts(odd)).block_tokens == 528
    known = own_schema("tiny", 1024)
    spec, schema = registration(facts(), PROFILE, URL, "a", known)
    assert (spec.block_tokens, schema) == (1024, known)


def test_events_of_several_ranks_behind_one_url_are_refused() -> None:
    two = METRICS + 'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0\n'
    assert registered(facts(two)).kv_capacity_tokens == 2 * 6144
    with pytest.raises(InvalidRequest, match="2 data-parallel ranks"):
        registered(facts(two), EngineOptions(profile="p", kv_events_port=5557))


def test_adapters_are_no_models_of_their_own() -> None:
    data = [{"id": "sql-lora", "parent": "tiny"}, {"id": "tiny", "parent": None}]
    told = facts(models=json.dumps({"data": data}).encode())
    assert told.models == ("tiny",)
    assert registered(told).labels["adapters"] == "sql-lora"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (EngineAnswers("up 1\n", MODELS), "no vLLM, and no SGLang with --enable-metrics"),
        (EngineAnswers("vllm:num_requests_running{ 1\n", MODELS), "no text of Prometheus"),
        (EngineAnswers(METRICS, b"<html>"), "/v1/models is no list"),
    ],
)
def test_answers_of_something_else(answers: EngineAnswers, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_facts(answers)
