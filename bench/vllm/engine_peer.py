"""One vLLM engine, run by the benchmark in the Python of an environment that has vLLM.

    engine_peer.py model FOLDER      write a random Llama of 8 KiB of KV cache per token
    engine_peer.py measure JSON      run an engine; the last line of its output is the result

The result has the milliseconds to the first token of each measured request: `cold`, before anything
is cached; then in turns `loaded`, after the engine's own cache was emptied, and `own`, from that
cache.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

VOCABULARY = 1024


def make_model(folder: str) -> None:
    """8 layers, 4 KV heads of 32 numbers, float32: 32 MiB of cache for 4,096 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Engine:
    """One engine, and how long its requests take."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        transfer = options["transfer"]
        self.llm = LLM(
            model=options["model"],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=options["tokens"] + 64,
            max_num_batched_tokens=options["tokens"] + 64,
            block_size=128,
            kv_cache_memory_bytes=1 << 30,
            max_num_seqs=4,
            enable_prefix_caching=True,
            distributed_executor_backend=options["executor"],
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self._sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        """Milliseconds, the token, and how many tokens were not computed."""
        began = time.perf_counter()
        request = [{"prompt_token_ids": prompt}]
        (output,) = self.llm.generate(request, self._sampling, use_tqdm=False)
        taken_ms = (time.perf_counter() - began) * 1e3
        return taken_ms, output.outputs[0].token_ids[0], output.num_cached_tokens or 0

    def forget(self, spare: list[int]) -> None:
        """Empty the engine's own cache. Pages that a save still reads are freed in a later step,
        which another short request brings about."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.05)
            self.first_token(spare)
        raise AssertionError("the engine's cache can't be emptied")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """See the top of this file."""
    dice = random.Random(options["seed"])
    spare = [dice.randrange(VOCABULARY) for _ in range(100)]
    prompts = [
        [dice.randrange(VOCABULARY) for _ in range(options["tokens"])]
        for _ in range(options["prompts"])
    ]
    engine = Engine(options)
    engine.first_token([dice.randrange(VOCABULARY) for _ in range(options["tokens"])])
    result: dict[str, Any] = {"cold": [], "loaded": [], "own": [], "cached": []}
    expected = {}
    if options["computes"]:
        for index, prompt in enumerate(prompts):
            taken_ms, expected[index], _ = engine.first_token(prompt)
            result["cold"].append(taken_ms)
        time.sleep(options["settle_s"])
        engine.first_token(spare)
    for _ in range(options["rounds"]):
        for index, prompt in enumerate(prompts):
            engine.forget(spare)
            engine.first_token(spare)
            taken_ms, token, cached = engine.first_token(prompt)
            assert expected.setdefault(index, token) == token, "other tokens than computed"
            result["loaded"].append(taken_ms)
            result["cached"].append(cached)
            result["own"].append(engine.first_token(prompt)[0])
    result["tokens"] = [expected.get(index) for index in range(len(prompts))]
    engine.llm.llm_engine.engine_core.shutdown()
    return result


if __name__ == "__main__":
    if sys.argv[1] == "model":
        make_model(sys.argv[2])
    else:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
