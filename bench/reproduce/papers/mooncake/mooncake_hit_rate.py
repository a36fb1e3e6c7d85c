"""Mooncake's hits over capacity (FAST '25, figure 9): one cache for all, in which nothing takes
time. The paper's blocks have 256 tokens, those of the traces it has published 512."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....plots import Line, Plot
from ....traces.ideal_cache import hit_share
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.inputs import conversation
from ...setups.toolagent_look_alike import toolagent

if TYPE_CHECKING:
    from ...registry import Effort, Tell

# Capacity in tokens: share of all prompt tokens that is hit, in percent; read off the figure.
CAPACITIES_TOKENS = (1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8)
CONVERSATION = (4.5, 7.3, 8.7, 12.0, 21.5, 24.7, 30.0, 32.6, 39.8, 40.1)
TOOL_AGENT = (17.3, 36.3, 38.6, 41.4, 48.4, 50.5, 54.4, 56.1, 59.5, 59.5)
NODE_TOKENS = 3e6  # "local cache": a node's memory


_NOTE = """The gap is about three points at any size from a million tokens on, as if blocks of 256
tokens found three points more; the ids of the traces are those of 512. Counting answers as cached
adds 0.9 points at most."""


@reproduction("mooncake-hit-rate", "Hits over the cache's size", "Mooncake, FAST '25, figure 9")
def hit_rate(effort: Effort, tell: Tell) -> Evidence:
    """Hit rate of the conversation trace, and of the look-alike of the other one."""
    found = {}
    for trace in (conversation(), toolagent(effort.seeds[0])):
        tell(trace.name)
        found[trace.name] = {
            tokens: 100 * hit_share(trace, int(tokens / trace.block_tokens))
            for tokens in (*CAPACITIES_TOKENS, NODE_TOKENS)
        }
    chat, tools = found.values()
    comparisons = [
        Comparison(f"hit rate, conversation, {tokens:.0e} tokens", published, chat[tokens], "%")
        for tokens, published in zip(CAPACITIES_TOKENS, CONVERSATION, strict=True)
    ]
    most = chat[CAPACITIES_TOKENS[-1]]
    statements = (
        Statement(
            "one node's memory has at most half of the hits that there are",
            chat[NODE_TOKENS] <= 0.5 * most,
            f"{chat[NODE_TOKENS]:.1f}% of {most:.1f}% in 3 million tokens",
        ),
        Statement(
            "50 million tokens, 20 nodes, have nearly all of them",
            chat[5e7] >= 0.95 * most,
            f"{chat[5e7]:.1f}% of {most:.1f}%",
        ),
        Statement(
            "tools and agents need less memory than chats for half of their hits",
            _half(tools) < _half(chat),
            f"{_half(tools):.0e} against {_half(chat):.0e} tokens",
        ),
    )
    return Evidence(tuple(comparisons), statements, (_plot(chat, tools),), (_NOTE,))


def _half(hits: dict[float, float]) -> float:
    """The least capacity with half of the hits that there are."""
    return min(tokens for tokens, hit in hits.items() if hit >= max(hits.values()) / 2)


def _plot(chat: dict[float, float], tools: dict[float, float]) -> Plot:
    lines = []
    for name, ours, published in (
        ("conversation", chat, CONVERSATION),
        ("tool & agent (look-alike)", tools, TOOL_AGENT),
    ):
        tokens = tuple(sorted(ours))
        lines.append(Line(f"{name}, here", tokens, tuple(ours[one] for one in tokens)))
        lines.append(Line(f"{name}, paper", CAPACITIES_TOKENS, published, "dots"))
    labels = ("capacity, tokens", "hits, % of prompt tokens")
    title = "What one cache for all could have"
    return Plot("mooncake-hit-rate", title, *labels, tuple(lines), log_x=True)
