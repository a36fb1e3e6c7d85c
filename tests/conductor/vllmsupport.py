"""A real vLLM as users start it: a tiny model, and KV events."""

from __future__ import annotations

import contextlib
import json
import os
import random
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from connectors.vllmserver import VllmServer
from directory.ports import free_port
from kvsupport import wait_until
from serversupport import GatewayProcess, Process

from tiffin.conductor.client import ConductorClient
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import openai
    import psutil
    from tokenizers import Tokenizer

    from tiffin.conductor.wire.models import InstanceReply

# A Python that has vLLM; docs/conductor/gateway.md says how to get one without a GPU.
VARIABLE = "TIFFIN_VLLM"
MODEL = "tiny"
SCHEMA = KVSchema.gqa(model=MODEL, layers=4, kv_heads=2, head_dim=32, dtype="float32")
# Of 128 tokens: twelve pool blocks, so that prompts evict each other.
ENGINE_BLOCKS = 48
WORDS = 1020
_SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
PATIENCE_S = 60.0
# Of every test with a real vLLM.
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no Python that has vLLM"
    ),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the engines extra is missing"),
]


class FrontDoor(NamedTuple):
    """A conductor and a gateway before it, each a process."""

    conductor: Process
    conductor_url: str
    gateway: GatewayProcess
    gateway_url: str


@contextlib.contextmanager
def front_door(folder: Path, model_settings: str) -> Iterator[FrontDoor]:
    """Start them; returns when both answer. `model_settings`: the gateway's, of our model."""
    config = folder / "gateway.toml"
    config.write_text(f'[models."{MODEL}"]\n{model_settings}\n')
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    listens = [url.removeprefix("http://") for url in urls]
    with Process("--listen", listens[0]) as conductor:
        conductor.wait_until_it_answers(urls[0])
        options = ("--listen", listens[1], "--conductor", urls[0], "--config", str(config))
        with GatewayProcess(*options) as gateway:
            gateway.wait_until_it_answers(urls[1])
            yield FrontDoor(conductor, urls[0], gateway, urls[1])


def prompt(seed: int, tokens: int) -> list[int]:
    """Random ids of words."""
    dice = random.Random(seed)
    return [dice.randrange(4, 4 + WORDS) for _ in range(tokens)]


def make_model(
    folder: Path, *, hidden: int = 128, layers: int = 4, every_text: bool = False
) -> None:
    """Write a model with random weights, scaled so that answers vary, and a word per token: "w5 w9"
    is [9, 13]. With `every_text` its tokens are bytes: it can be made to say JSON."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = _bytes() if every_text else _words()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=raw.get_vocab_size(), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=8192, bos_token_id=2, eos_token_id=3, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _words() -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [*_SPECIAL, *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _bytes() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i - 4}" for i in ids)


class Vllm(VllmServer):
    """One of several that publish KV events."""

    def __init__(self, name: str, model: Path, *more: str) -> None:
        self.name = name
        self._events, self._replay = free_port(), free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replay}",
        }
        options = ("--num-gpu-blocks-override", str(ENGINE_BLOCKS))
        options += ("--kv-events-config", json.dumps(events), *more)
        super().__init__(os.environ[VARIABLE], model, model.parent / f"{name}.log", *options)

    @property
    def endpoints(self) -> tuple[str, str]:
        """The addresses where it publishes and where it replays events."""
        return f"tcp://127.0.0.1:{self._events}", f"tcp://127.0.0.1:{self._replay}"

    def add_to(self, conductor: ConductorClient, profile: str) -> InstanceReply:
        """Let the conductor ask it what it is, as `tiffin conductor add` does."""
        return conductor.add_engine(
            self.url,
            id=self.name,
            profile=profile,
            kv_events_port=self._events,
            kv_events_replay_port=self._replay,
        )

    def pause(self) -> None:
        for one in self._computing():
            one.suspend()

    def go_on(self) -> None:
        for one in self._computing():
            one.resume()

    def _computing(self) -> list[psutil.Process]:
        engine = self.engine()
        return [engine, *engine.children(recursive=True)]

    def answer(self, path: str, body: dict[str, Any]) -> list[int]:
        """The tokens of its answer, without the gateway."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    def hit_tokens(self) -> float:
        """The tokens of all prompts that it found in its cache."""
        return self.counter("prefix_cache_hits")


def openai_client(url: str) -> openai.OpenAI:
    """OpenAI's client of a server, which asks once. Close it, or use it in a `with`."""
    import openai

    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)


@contextlib.contextmanager
def clients_of(
    engines: Sequence[Vllm], door: FrontDoor
) -> Iterator[tuple[httpx.Client, openai.OpenAI, openai.OpenAI]]:
    """Clients of a gateway that is ready, plain and OpenAI's, and OpenAI's of the first engine."""
    with contextlib.ExitStack() as stack:
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        stack.callback(http.close)
        through, direct = (
            stack.enter_context(openai_client(url)) for url in (door.gateway_url, engines[0].url)
        )
        wait_until(lambda: http.get("/readyz").status_code == 200, "the gateway knows", PATIENCE_S)
        yield http, through, direct


@contextlib.contextmanager
def two_vllms(
    folder: Path,
    model_settings: str,
    profile: str,
    *more: str,
    own: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[tuple[list[Vllm], FrontDoor]]:
    """Two of them, `a` and `b`, of the model in `folder` with the options `more` and those of their
    `own`, behind a front door whose conductor has asked them what they are."""
    with contextlib.ExitStack() as stack:
        engines = [Vllm(name, folder / "model", *more, *own.get(name, ())) for name in ("a", "b")]
        for one in engines:
            stack.callback(one.close)
            one.start()
        door = stack.enter_context(front_door(folder, model_settings))
        for one in engines:
            one.wait()
        conductor = stack.enter_context(ConductorClient(door.conductor_url))
        for one in engines:
            one.add_to(conductor, profile)
        yield engines, door
