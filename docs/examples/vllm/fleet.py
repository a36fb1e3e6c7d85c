"""Two vLLMs with few pages, each at a node of its own of one pool, behind a conductor and a
gateway: six users talk, the conductor says what each prompt will find, and one engine is killed.

    python docs/examples/vllm/fleet.py

Nobody tells the conductor anything about keys, nodes or caches: it asks the engines. Exits with 1
if an engine found something else than was predicted, or too little after the kill.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import BLOCK_TOKENS, check_installed
from services import (
    MODEL,
    TIFFIN,
    Service,
    add,
    check_services,
    conductor,
    free_port,
    gateway,
    vllm,
)
from tiny_model import make_model, make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

USERS, TURNS = 6, 3
PAGE_TOKENS, PAGES = 128, 48  # an engine has room for 6,144 tokens: of two or three users


@contextmanager
def pool() -> Iterator[dict[str, Any]]:
    """Two nodes and a Redis; what `tiffin up` says of them."""
    command = [sys.executable, "-c", TIFFIN, "up", "--json", "--nodes", "2", "--redis"]
    with subprocess.Popen(
        [*command, "--dram", "128MiB"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as up:
        try:
            assert up.stdout is not None
            yield json.loads(up.stdout.readline())
        finally:
            up.terminate()


def engine(name: str, model: Path, url: str, ports: tuple[int, int]) -> Service:
    """A vLLM that publishes what is in its own cache."""
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}",
    }  # fmt: skip
    options = ("--num-gpu-blocks-override", str(PAGES), "--max-model-len", "4096")
    options += ("--kv-events-config", json.dumps(events))
    return vllm(name, model, url, "kv_both", *options, engine=name)


def ask(client: OpenAI, prompt: list[int]) -> tuple[str, int, int]:
    """Which instance answers, how many cached tokens the conductor counts on, and how many the
    engine found."""
    response = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0
    )
    usage = response.parse().usage
    details = usage.prompt_tokens_details if usage else None
    expected = int(response.headers["x-tiffin-cached-tokens"])
    return response.headers["x-tiffin-decode"], expected, (details and details.cached_tokens) or 0


def talk(client: OpenAI, prompts: list[list[int]]) -> bool:
    """Everybody's prompt, one after the other. Returns whether all found what was predicted."""
    good = True
    for user, prompt in enumerate(prompts):
        instance, expected, found = ask(client, prompt)
        good &= abs(expected - found) <= PAGE_TOKENS
        print(f"user {user}   {instance} {len(prompt):8} {expected:10} {found:7}", flush=True)
    return good


def main() -> int:
    """The exit status."""
    check_installed()
    check_services()
    from openai import OpenAI

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(pool())
        model = make_model(folder)
        given = dict(part.split("=", 1) for part in nodes["url"].partition("?")[2].split("&"))
        directory = f"{nodes['url'].partition('?')[0]}?password_file={given['password_file']}"
        ports = {name: (free_port(), free_port()) for name in ("a", "b")}
        homes = {
            name: f"{nodes['url']}&home={one['socket']}"
            for name, one in zip(ports, nodes["nodes"], strict=True)
        }
        engines = {
            name: stack.enter_context(engine(name, model, homes[name], ports[name]))
            for name in ports
        }
        options = ("--directory", directory, "--pool-token-file", given["token_file"])
        conducting = stack.enter_context(conductor(folder, *options))
        print("two vLLMs start: half a minute", flush=True)
        for one in (*engines.values(), conducting):
            one.wait()
        for name, one in engines.items():
            add(conducting, name, one, "mixed", ports[name])
        door = stack.enter_context(gateway(folder, conducting))
        door.wait()
        client = OpenAI(base_url=f"{door.url}/v1", api_key="none")

        print("         at   prompt  predicted   found", flush=True)
        prompts = [make_prompt(1300, seed=user) for user in range(USERS)]
        good = True
        for turn in range(TURNS):
            good &= talk(client, prompts)
            if turn + 1 < TURNS:
                more = (make_prompt(500, seed=100 * turn + user) for user in range(USERS))
                prompts = [said + new for said, new in zip(prompts, more, strict=True)]
        time.sleep(2)  # an engine saves after it has answered
        print("engine a is killed, and starts again", flush=True)
        engines["a"].kill()
        again = stack.enter_context(engine("a", model, homes["a"], ports["a"]))
        again.wait()
        add(conducting, "a", again, "mixed", ports["a"])
        blocks = sum(ask(client, p)[2] // BLOCK_TOKENS for p in prompts)
        print(f"of {USERS} last prompts, {blocks} blocks were found", flush=True)
        wanted = sum(len(p) // BLOCK_TOKENS for p in prompts)
        return 0 if good and blocks >= 0.95 * wanted else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
