"""Two real vLLMs whose model listens, each at a node of one pool, behind a gateway: what is
predicted of a chat with sounds is what is found.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s \\
    tests/conductor/gateway/test_media_vllm.py
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import random
import wave
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from directory.ports import free_port
from fleetsupport import BLOCK, Fleet, started_fleet
from kvsupport import wait_until
from serversupport import GatewayProcess
from vllmsupport import MARKS, MODEL, PATIENCE_S, WORDS, prompt, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = MARKS

# 600 tokens.
RATE, SECONDS, MELS = 16_000, 24, 128
SOUND_TOKENS = SECONDS * 25
# A block of text, then a sound over two blocks; and less than a page behind the third block.
BEFORE, AFTER = 600, 400
_seeds = itertools.count(1000, 10)


@dataclass
class World:
    fleet: Fleet
    http: httpx.Client

    def ask(self, content: list[dict[str, Any]], **more: Any) -> tuple[int, int]:
        """Chat. Returns the tokens predicted and found."""
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0, **more}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == BEFORE + SOUND_TOKENS + AFTER
        predicted, details = (
            answer.headers["x-tiffin-cached-tokens"],
            usage["prompt_tokens_details"],
        )
        return int(predicted), details["cached_tokens"] if details else 0

    def wait_until_saved(self, content: list[dict[str, Any]], **more: Any) -> None:
        wait_until(
            lambda: self.ask(content, **more)[0] == 3 * BLOCK, "all is saved, and known", PATIENCE_S
        )


def make_listener(folder: Path) -> None:
    """Write a Qwen2-Audio with random weights, and a word per token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    marks = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    names = ["<pad>", "<unk>", "<bos>", "<eos>", *(f"w{i}" for i in range(WORDS)), *marks]
    raw = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        pad_token="<pad>", additional_special_tokens=marks,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}{{ c['text'] }} {% else %}<|AUDIO|> {% endif %}"
        "{% endfor %}{% endfor %}"
    )
    hearing = WhisperFeatureExtractor(feature_size=MELS)
    Qwen2AudioProcessor(hearing, tokenizer, tokenizer.chat_template).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    text = Qwen2Config(
        vocab_size=len(names), hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        bos_token_id=2, eos_token_id=3, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    ears = Qwen2AudioEncoderConfig(
        num_mel_bins=MELS, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
        d_model=32,
    )  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=ears, text_config=text, audio_token_index=names.index("<|AUDIO|>")
    )
    Qwen2AudioForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)


def sound(seed: int, uuid: str = "") -> dict[str, Any]:
    """Noise, as a part of a chat."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(random.Random(seed).randbytes(2 * RATE * SECONDS))
    url = "data:audio/wav;base64," + base64.b64encode(made.getvalue()).decode()
    return {"type": "audio_url", "audio_url": {"url": url}, **({"uuid": uuid} if uuid else {})}


def text(seed: int, tokens: int) -> dict[str, Any]:
    return {"type": "text", "text": words(prompt(seed, tokens))}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("media")
    url = f"http://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        started = started_fleet(folder, "--enable-scale-out", make=make_listener)
        fleet = stack.enter_context(started)
        listen = url.removeprefix("http://")
        gateway = GatewayProcess("--listen", listen, "--conductor", fleet.url)
        stack.enter_context(gateway).wait_until_it_answers(url)
        http = httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S)
        yield World(fleet, stack.enter_context(http))


@pytest.mark.parametrize("uuids", [False, True], ids=["hashed", "named by the client"])
def test_what_is_found_is_what_was_predicted(world: World, uuids: bool) -> None:
    seed = next(_seeds)
    cat, dog = (sound(seed + n, f"{seed}-{n}" if uuids else "") for n in (1, 2))
    before, after = text(seed, BEFORE), text(seed + 1, AFTER)
    assert world.ask([before, cat, after]) == (0, 0)
    world.wait_until_saved([before, cat, after])
    assert world.ask([before, cat, after]) == (3 * BLOCK, 3 * BLOCK)
    assert world.ask([before, dog, after]) == (BLOCK, BLOCK), "the text before it is the same"
    world.wait_until_saved([before, dog, after])
    assert world.ask([before, cat, after], cache_salt=f"{seed}") == (0, 0)


def test_engines_that_start_again_find_them_in_the_pool(world: World) -> None:
    seed = next(_seeds)
    content = [text(seed, BEFORE), sound(seed), text(seed + 1, AFTER)]
    world.wait_until_saved(content)
    world.fleet.start_again(*world.fleet.engines)
    assert world.ask(content) == (3 * BLOCK, 3 * BLOCK)
