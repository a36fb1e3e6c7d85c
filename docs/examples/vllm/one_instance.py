"""A vLLM computes a prompt; another, started after the first has ended, loads it from the pool.

    python docs/examples/vllm/one_instance.py

Exits with 1 if the second computed more than the prompt's last tokens, or answered differently.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from engines import BLOCK_TOKENS, Engine, check_installed, node, saved
from tiny_model import make_model, make_prompt

PROMPT_TOKENS = 6000


def main() -> int:
    """The exit status."""
    check_installed()
    prompt = make_prompt(PROMPT_TOKENS, seed=1)
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    with tempfile.TemporaryDirectory() as folder, node(Path(folder)) as url:
        model = make_model(Path(folder))
        with Engine(model, url) as engine:
            cold = engine.answer(prompt)
            print(f"first engine:   {cold}", flush=True)
            saved(url, blocks)
        with Engine(model, url) as engine:
            warm = engine.answer(prompt)
            print(f"second engine:  {warm}", flush=True)
    same = cold.tokens == warm.tokens
    print(f"{len(warm.tokens)} tokens of the answer: {'the same' if same else 'DIFFERENT'}")
    return 0 if same and cold.cached == 0 and warm.cached == blocks * BLOCK_TOKENS else 1


if __name__ == "__main__":
    sys.exit(main())
