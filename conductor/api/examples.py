"""Examples of bodies and answers, by operation. Tests send the bodies, and compare the answers with
the structs."""

from __future__ import annotations

from typing import Any

BODIES: dict[str, Any] = {
    "schedule": {
        "request_id": "chatcmpl-7f3a",
        "model": "llama-3-8b",
        "prompt_tokens": 4096,
        "block_keys": ["6f1ed002ab5595859014ebf0951522d9"],
        "objectives": {"ttft_s": 2.0, "tbt_s": 0.05},
        "output_tokens_max": 512,
    },
    "event": {"tokens": 16},
    "events": {
        "events": [
            {"request_id": "chatcmpl-7f3a", "event": "first_token"},
            {"request_id": "chatcmpl-52c1", "event": "tokens", "total_tokens": 65},
            {"request_id": "chatcmpl-0b9d", "event": "finished", "tenant": "acme"},
        ]
    },
    "announce": {
        "model": "llama-3-8b",
        "role": "prefill",
        "profile": "llama-3.1-8b.h100.tp1.vllm",
        "url": "http://127.0.0.1:8000",
        "node": "node-a",
        "block_bytes": 67108864,
        "load": {"queued_prefill_tokens": 12000, "running": 0},
    },
    "flip": {"role": "decode"},
    "next_prefills": {"n": 4, "idle": True},
    "match": {"block_keys": ["6f1ed002ab5595859014ebf0951522d9"]},
    "drain_node": {"deadline_s": 600},
}

_FETCH = {
    "start": 4,
    "stop": 7,
    "source": "node-a",
    "tier": "dram",
    "nbytes": 201326592,
    "seconds": 0.052,
}
_RATE = {"name": "rate", "value": 10.0, "unit": "requests/s", "why": "constant over 12 intervals"}
_PLAN = {
    "model": "llama-3-8b", "planned_at": 1790000000.0, "mode": "advise",
    "prefill": 2, "decode": 6, "mixed": 0, "load": 1.31, "serves_rate": 7.6,
    "best_prefill": 3, "instances_wanted": 13, "flip": {"instance": "decode-5", "role": "prefill"},
    "flip_now": False, "held_back": "only advice is asked for", "reasons": [_RATE],
}  # fmt: skip
_NODE = {
    "kind": "node", "name": "node-a", "phase": "hot", "left_s": 588.0, "unique_blocks": 120,
    "moved_blocks": 64, "moved_bytes": 4294967296, "handed_over": 0, "left_blocks": 0,
    "failures": 0, "requests": 0,
}  # fmt: skip
_INSTANCE = {
    "kind": "instance", "name": "decode-1", "phase": "waiting", "left_s": 588.0,
    "unique_blocks": 12, "moved_blocks": 0, "moved_bytes": 0, "handed_over": 0, "left_blocks": 0,
    "failures": 0, "requests": 3,
}  # fmt: skip

ANSWERS: dict[str, Any] = {
    "schedule": {
        "request_id": "chatcmpl-7f3a", "prefill": "prefill-3", "decode": "decode-1",
        "prefill_url": "http://10.0.0.13:8000", "decode_url": "http://10.0.0.21:8000",
        "policy": "kvcache_centric", "predicted_ttft_s": 0.41, "predicted_tbt_s": 0.021,
        "cached_tokens": 3584, "available_tokens": 3584, "fetches": [_FETCH],
        "fetch_within_s": 0.09, "layerwise": True,
        "output_tokens_max": None, "degraded": [], "shards": [],
        "alternatives": [], "expires_in_s": 60.0, "conductor": "",
        "held": {"place": 3, "release_s": 0.27},
        "placement": "predicted", "local_s": 0.93, "remote_s": 0.44,
        "output_tokens": 180, "output_source": "class", "model": "",
    },
    "events": {
        "taken": 2,
        "failed": [
            {
                "at": 2, "status": 404,
                "error": {
                    "message": "no request 'acme/chatcmpl-0b9d' is in flight",
                    "type": "invalid_request_error", "code": "unknown_request", "param": None,
                    "tiffin": None,
                },
            }
        ],
    },
    "release": {"state": "released", "place": 0, "release_s": 0.0, "first_token_s": 0.31},
    "next_prefills": {"requests": [{"request_id": "chatcmpl-7f3a", "tenant": ""}]},
    "match": {
        "asked_blocks": 1,
        "blocks": 1,
        "holders": [{"holder": "node-a/dram", "blocks": 1, "age_s": 0.4, "part_tokens": 0}],
    },
    "plans": {"leads": True, "leader": "host-a:9f3c52e0b1d4", "plans": [_PLAN], "flips": []},
    "drains": {"drains": [_NODE, _INSTANCE]},
    "drain_node": {**_NODE, "phase": "closing", "left_s": 600.0},
    "undrain_node": {**_NODE, "phase": "cancelled", "left_s": 0.0},
}  # fmt: skip
