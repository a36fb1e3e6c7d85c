"""A vLLM engine, and how long its requests take."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from .model import VOCABULARY

PAGE_TOKENS = 128
# Fewer than a page, so that no cache keeps them.
_SPARE_TOKENS = 100
_EMPTYING = 200


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`transfer`: the fields of vLLM's KVTransferConfig. `in_process`: the engine's core is in this
    process, which vLLM's servers have apart. `context_tokens`: the longest request. `pages`: of the
    engine's own cache, a MiB each."""

    model: str
    transfer: dict[str, Any] | None
    in_process: bool
    context_tokens: int
    pages: int = 1024
    seed: int = 1


class Engine:
    """A running engine."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        transfer = options.transfer
        self._dice = random.Random(options.seed)
        self._sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._spare = self.prompt(_SPARE_TOKENS)
        self.llm = LLM(
            model=options.model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=options.context_tokens,
            max_num_batched_tokens=options.context_tokens,
            block_size=PAGE_TOKENS,
            kv_cache_memory_bytes=options.pages << 20,
            # On a CPU vLLM does not heed the bytes.
            num_gpu_blocks_override=options.pages,
            max_num_seqs=4,
            enable_prefix_caching=True,
            disable_log_stats=False,
            distributed_executor_backend="uni" if options.in_process else None,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )

    def prompt(self, tokens: int) -> list[int]:
        """A random prompt; the same sequence of prompts for the same seed."""
        return [self._dice.randrange(VOCABULARY) for _ in range(tokens)]

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        """Milliseconds, the token, and how many tokens were not computed."""
        began = time.perf_counter()
        request = [{"prompt_token_ids": prompt}]
        (output,) = self.llm.generate(request, self._sampling, use_tqdm=False)
        taken_ms = (time.perf_counter() - began) * 1e3
        return taken_ms, output.outputs[0].token_ids[0], output.num_cached_tokens or 0

    def generate(self, prompts: list[Any], answer_tokens: int) -> None:
        """Answer prompts with so many tokens each, as many at a time as the engine takes."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.generate(prompts, sampling, use_tqdm=False)

    def forget(self) -> None:
        """Empty the engine's own cache. Pages that a save still reads are freed in a later step,
        which another short request brings about."""
        for _ in range(_EMPTYING):
            if self.llm.reset_prefix_cache():
                self.first_token(self._spare)
                return
            time.sleep(0.05)
            self.first_token(self._spare)
        raise AssertionError("the engine's cache can't be emptied")

    def close(self) -> None:
        """End its processes."""
        self.llm.llm_engine.engine_core.shutdown()
