"""Two vLLMs run at once and share a node: each loads what the other has computed.

    python docs/examples/vllm/two_instances.py

Exits with 1 if one computed what the other had, or answered differently.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from engines import BLOCK_TOKENS, Engine, check_installed, node, saved
from tiny_model import make_model, make_prompt

SYSTEM_PROMPT = make_prompt(8 * BLOCK_TOKENS, seed=1)


def main() -> int:
    """The exit status."""
    check_installed()
    first = SYSTEM_PROMPT + make_prompt(700, seed=2)
    second = SYSTEM_PROMPT + make_prompt(700, seed=3)
    with tempfile.TemporaryDirectory() as folder, node(Path(folder)) as url:
        model = make_model(Path(folder))
        with Engine(model, url) as a, Engine(model, url) as b:
            answers = [a.answer(first)]
            print(f"a, first prompt:   {answers[0]}", flush=True)
            saved(url, 9)
            # Of the second prompt b finds the system prompt, and computes the rest.
            for name, engine, prompt, blocks in (
                ("b, first prompt", b, first, 9),
                ("b, second prompt", b, second, 10),
                ("a, second prompt", a, second, 10),
            ):
                answers.append(engine.answer(prompt))
                print(f"{name + ':':18} {answers[-1]}", flush=True)
                saved(url, blocks)
    cached = [answer.cached // BLOCK_TOKENS for answer in answers]
    same = answers[0].tokens == answers[1].tokens and answers[2].tokens == answers[3].tokens
    print(f"answers of a and b: {'the same' if same else 'DIFFERENT'}")
    return 0 if same and cached == [0, 9, 8, 9] else 1


if __name__ == "__main__":
    sys.exit(main())
