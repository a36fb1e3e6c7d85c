"""Whole vLLM engines in this process, one after the other, and conversations to have with them."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvsupport import damage
from tinymodels import FIRST_TOKEN, VOCABULARY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm.lora.request import LoRARequest

    from tiffin.kvstore import Prefix

CACHE_BYTES = 64 << 20  # 32000 tokens of a tiny model
SAID = 16  # tokens of an answer
BLOCK_TOKENS = 512

Tokens = list[int]


@dataclass(frozen=True)
class Answer:
    """What an engine said; `cached`: how many tokens of the prompt it did not compute."""

    tokens: Tokens
    cached: int
    reason: str


@dataclass(frozen=True)
class Turn:
    """Prompts of one moment, and what the model says to them."""

    prompts: list[Tokens]
    said: list[Tokens]


def transfer(
    url: str, namespace: str, policy: str = "recompute", **settings: Any
) -> KVTransferConfig:
    """`--kv-transfer-config` as in docs/vllm.md."""
    return KVTransferConfig(
        kv_connector="TiffinConnector",
        kv_connector_module_path="tiffin.kvstore.connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"url": url, "namespace": namespace, **settings},
    )


class Engine:
    """vLLM in this process; close it before the next one starts."""

    def __init__(self, model: Path, pool: KVTransferConfig | None = None, **changes: Any) -> None:
        options: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "block_size": 128,
            "enable_prefix_caching": True,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
        }
        try:
            self._llm = LLM(str(model), kv_transfer_config=pool, **{**options, **changes})
        except BaseException:
            _clean_up()
            raise
        self._core = self._llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The connector in its scheduler."""
        return self._core.scheduler.connector

    def prefix(self, tokens: Sequence[int]) -> Prefix:
        """The blocks of these tokens, as this engine names them."""
        connector = self.connector
        name = connector._scheduler._settings.namespace
        return connector._schema.prefix(list(tokens), namespace=name)

    def generate(
        self, prompts: list[Tokens], salt: str = "", adapter: LoRARequest | None = None
    ) -> list[Answer]:
        """Greedy answers, in order, once all that they store is stored."""
        self.start(prompts, salt, adapter)
        answers = self.finish()
        return [answers[str(index)] for index in range(len(prompts))]

    def start(
        self, prompts: list[Tokens], salt: str = "", adapter: LoRARequest | None = None
    ) -> None:
        """Start requests named "0", "1" and so on."""
        parameters = SamplingParams(temperature=0, max_tokens=SAID, ignore_eos=True)
        for index, tokens in enumerate(prompts):
            prompt = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
            self._llm.llm_engine.add_request(str(index), prompt, parameters, lora_request=adapter)

    def log_likelihoods(self, prompts: list[Tokens]) -> list[dict[int, float]]:
        """Of the likeliest next tokens of each prompt."""
        parameters = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        found = self._llm.generate(requests, parameters, use_tqdm=False)
        return [
            {token: one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
            for answer in found
        ]

    def load(self, adapter: LoRARequest) -> None:
        """Load an adapter, before a request names it."""
        self._llm.llm_engine.add_lora(adapter)

    def reset(self) -> bool:
        """Reset vLLM's prefix cache and the connector, as `/reset_prefix_cache` does."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def reload(self, model: Path) -> None:
        """Replace the weights in place by those of another folder."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})

    def abort(self, names: Sequence[str]) -> None:
        """End requests, as a server does whose clients have gone."""
        self._llm.llm_engine.abort_request(list(names))

    def counter(self, name: str, **labels: str) -> float:
        """One of the connector's counters since the engine's start, over all other labels."""
        found = [one for one in self._llm.get_metrics() if one.name == f"vllm:tiffin_{name}"]
        return float(sum(one.value for one in found if labels.items() <= one.labels.items()))

    def step(self) -> dict[str, Answer]:
        """Run one step; returns the answers that it ended."""
        return {
            one.request_id: Answer(
                list(one.outputs[0].token_ids),
                one.num_cached_tokens or 0,
                str(one.outputs[0].finish_reason),
            )
            for one in self._llm.llm_engine.step()
            if one.finished
        }

    def finish(self) -> dict[str, Answer]:
        """Run until all requests have ended and all saves too; returns the answers."""
        answers: dict[str, Answer] = {}
        while self._llm.llm_engine.has_unfinished_requests():
            answers |= self.step()
        while self._core.scheduler.has_requests():  # a server goes on by itself
            self._core.step_fn()
        return answers

    def play(self, turns: Sequence[Turn]) -> list[int]:
        """Have conversations and check every answer; returns how many tokens of each prompt the
        engine did not compute."""
        cached = []
        for turn in turns:
            answers = self.generate(turn.prompts)
            assert [answer.tokens for answer in answers] == turn.said
            cached += [answer.cached for answer in answers]
        return cached

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._core
        _clean_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _clean_up() -> None:
    gc.collect()
    cleanup_dist_env_and_memory()


def spoil(engine: Engine, url: str, prompts: Sequence[Tokens]) -> None:
    """Change bytes all over the blocks of prompts, behind the node's back."""
    with Client.open(url, verify="off") as client:
        for prompt in prompts:
            with client.get(engine.prefix(prompt)) as blocks:
                for index in range(len(blocks)):
                    memory = blocks[index].memory
                    for at in range(3, len(memory), len(memory) // 128 // 4 * 4):
                        damage(memory, at)  # a bit of a number's exponent


# -- conversations ---------------------------------------------------------------------------------


def random_tokens(dice: random.Random, count: int) -> Tokens:
    return [dice.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def converse(engine: Engine, seed: int, turns: int = 3) -> list[Turn]:
    """Conversations with an engine without a pool: two share a system prompt of more than a block,
    one is a block exactly, and one is short. Each turn goes on where the last one ended."""
    dice = random.Random(seed)
    system = random_tokens(dice, 700)
    prompts = [
        system + random_tokens(dice, 100),
        system + random_tokens(dice, 900),
        random_tokens(dice, BLOCK_TOKENS),
        random_tokens(dice, 60),
    ]
    script = []
    for _ in range(turns):
        said = [answer.tokens for answer in engine.generate(prompts)]
        script.append(Turn(prompts, said))
        prompts = [
            [*prompt, *answer, *random_tokens(dice, dice.randrange(50, 400))]
            for prompt, answer in zip(prompts, said, strict=True)
        ]
    return script


def converse_with_many(
    engine: Engine, seed: int, conversations: int = 50, turns: int = 4
) -> list[Turn]:
    """Conversations of some 600 to 2,400 tokens, with an engine without a pool. Each begins with
    one of five system prompts, and goes on with what the engine said and new words."""
    dice = random.Random(seed)
    systems = [random_tokens(dice, dice.randrange(512, 800)) for _ in range(5)]
    prompts = [
        systems[index % 5] + random_tokens(dice, dice.randrange(90, 400))
        for index in range(conversations)
    ]
    script = []
    for _ in range(turns):
        said = [answer.tokens for answer in engine.generate(prompts)]
        script.append(Turn(prompts, said))
        prompts = [
            [*prompt, *answer, *random_tokens(dice, dice.randrange(50, 400))]
            for prompt, answer in zip(prompts, said, strict=True)
        ]
    return script


def loadable(tokens: Tokens) -> int:
    """How many tokens of a prompt an engine does not compute that finds all blocks in the pool."""
    blocks = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    return min(blocks, len(tokens) - 1)
