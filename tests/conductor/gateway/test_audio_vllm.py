"""Two real vLLMs whose model listens, behind the gateway: what OpenAI's client gets of recordings
is what vLLM itself says.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_audio_vllm.py
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from kvsupport import wait_until
from latencysupport import total
from vllmsupport import MARKS, MODEL, PATIENCE_S, clients_of, two_vllms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# Room for many recordings in each engine.
OPTIONS = ("--max-model-len", "448", "--num-gpu-blocks-override", "800")
RATE = 16_000


@dataclass
class World:
    """Clients of the gateway, and of one of the engines."""

    http: httpx.Client
    engine: httpx.Client
    client: openai.OpenAI
    direct: openai.OpenAI


def make_listener(folder: Path) -> None:
    """Write a Whisper with random weights, whose tokens are bytes and those that it is steered
    with."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer({letter: at for at, letter in enumerate(letters)}, merges=[])
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = [f"<|{name}|>" for name in ("startoftranscript", *LANGUAGES, *tasks)]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.add_tokens([f"<|{0.02 * at:.2f}|>" for at in range(1501)])
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    end, begin = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|startoftranscript|>"])
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=128, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        decoder_start_token_id=begin, suppress_tokens=None, begin_suppress_tokens=None,
        init_std=0.3,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)


def recording(seconds: float, hertz: float) -> bytes:
    """A rising tone, as a WAV file."""
    samples = (
        int(9000 * math.sin(2 * math.pi * (hertz + at / 40) * at / RATE))
        for at in range(int(seconds * RATE))
    )
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return made.getvalue()


SHORT, LONG = recording(1.0, 300.0), recording(3.0, 500.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("audio")
    make_listener(folder / "model")
    with contextlib.ExitStack() as stack:
        started = two_vllms(folder, 'keys = "conductor"', PROFILE, *OPTIONS)
        engines, door = stack.enter_context(started)
        http, *clients = stack.enter_context(clients_of(engines, door))
        yield World(http, engines[0].http, *clients)


def asked(sound: bytes, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "file": ("a.wav", sound), "temperature": 0.0, **more}


@pytest.mark.parametrize("form", ["json", "text", "verbose_json"])
@pytest.mark.parametrize("sound", [SHORT, LONG], ids=["short", "long"])
def test_a_recording_becomes_text(world: World, sound: bytes, form: Any) -> None:
    body = asked(sound, language="en", response_format=form)
    found, expected = (
        one.audio.transcriptions.create(**body) for one in (world.client, world.direct)
    )
    assert found == expected
    assert len(found if form == "text" else found.text) > 20


def test_another_language_and_a_translation(world: World) -> None:
    body = asked(SHORT, language="de")
    there = [one.audio.transcriptions.create(**body) for one in (world.client, world.direct)]
    assert there[0] == there[1]
    assert there[0] != world.direct.audio.transcriptions.create(**asked(SHORT, language="en"))
    form = {"model": MODEL, "temperature": "0"}
    found, expected = (
        one.post("/v1/audio/translations", data=form, files={"file": ("a.wav", SHORT)})
        for one in (world.http, world.engine)
    )
    assert (found.status_code, found.json()) == (200, expected.json())


def test_a_text_that_comes_in_pieces(world: World) -> None:
    def answered() -> float:
        counted = "tiffin_gateway_answered_tokens_total"
        return total(world.http.get("/metrics").content, counted)

    body, texts, before = asked(LONG, language="en", stream=True), [], answered()
    for one in (world.client, world.direct):
        with one.audio.transcriptions.with_streaming_response.create(**body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events.pop() == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        texts.append([delta["content"] for delta in deltas if delta.get("content")])
    assert "".join(texts[0]) == "".join(texts[1]), "of two tokens at once vLLM makes one piece"
    assert answered() - before >= len(texts[0]) > 20, "counted as they came"


def test_what_is_no_recording(world: World) -> None:
    errors = []
    for one in (world.client, world.direct):
        with pytest.raises(openai.BadRequestError) as error:
            one.audio.transcriptions.create(**asked(b"no sound"))
        errors.append(error.value.body)
    assert errors[0] == errors[1]
    with pytest.raises(openai.NotFoundError):
        world.client.audio.transcriptions.create(**{**asked(SHORT), "model": "none"})


def test_many_at_a_time_are_counted_and_leave_nothing(world: World) -> None:
    def text(number: int) -> str:
        sound = (SHORT, LONG)[number % 2]
        return world.client.audio.transcriptions.create(**asked(sound, language="en")).text

    def served() -> float:
        name, route = "tiffin_gateway_requests_total", "/v1/audio/transcriptions"
        return total(world.http.get("/metrics").content, name, route=route, status="200")

    before = served()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(text, range(12)))
    assert len(set(texts)) == 2
    assert texts[0] != texts[1]
    assert served() - before == len(texts)
    idle = "tiffin_gateway_requests_in_flight 0.0"
    wait_until(lambda: idle in world.http.get("/metrics").text, "nothing is left", PATIENCE_S)
