"""Which replica gets a generation: the one with the least to do, or one that knows its prefix.

Pure functions over numbers that are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from draftgate.upstream.types import ChatPrompt, Prompt, TextPrompt

__all__ = ["Load", "choose", "prefix_key", "prompt_tokens", "slow_start_weight"]

_KEY_IDS = 256
_KEY_CHARACTERS = 1024
"""How much of a prompt says where its prefix is likely cached: about as much as _KEY_IDS."""

_CHARACTERS_PER_TOKEN = 4
"""Of English text, roughly; here only the load depends on it."""

_MIN_WEIGHT = 0.1
"""A replica that just came gets this share of what a warm one has to do."""


@dataclass(frozen=True)
class Load:
    """What one replica has to do."""

    name: str
    """Unique among those to choose from, and the same in every gateway."""
    tokens: int
    """Prompt tokens to read and tokens still to emit, over its generations."""
    weight: float = 1.0
    """The share of a warm replica's load that it may have; in (0, 1]."""


def choose(loads: Sequence[Load], *, key: bytes, tokens: int, affinity_tokens: float) -> str:
    """The name of the replica for a generation of so many tokens.

    It is the one that `key` always prefers (rendezvous hashing: the loss of another replica does
    not change that), unless it would have over `affinity_tokens` more to do than the least loaded.
    Loads are compared with the new generation's tokens added, each over its weight.
    """

    def score(load: Load) -> float:
        return (load.tokens + tokens) / load.weight

    def preference(load: Load) -> bytes:
        return blake2b(load.name.encode(), key=key, digest_size=8).digest()

    # Among equals the key decides too, so that idle replicas share the prompts out.
    least = min(loads, key=lambda load: (score(load), preference(load)))
    preferred = max(loads, key=preference)
    return preferred.name if score(preferred) <= score(least) + affinity_tokens else least.name


def slow_start_weight(age_s: float, slow_start_s: float) -> float:
    """The weight of a replica that has been ready for `age_s`: it rises to 1 in `slow_start_s`."""
    if age_s >= slow_start_s:
        return 1.0
    return max(_MIN_WEIGHT, age_s / slow_start_s)


def prefix_key(prompt: Prompt) -> bytes:
    """A key that prompts with the same beginning share."""
    if isinstance(prompt, TextPrompt):
        start = prompt.text[:_KEY_CHARACTERS].encode()
    elif isinstance(prompt, ChatPrompt):
        start = _chat_start(prompt).encode()
    else:
        start = b"".join(token.to_bytes(4, "little") for token in prompt.ids[:_KEY_IDS])
    return blake2b(start, digest_size=16).digest()


def prompt_tokens(prompt: Prompt) -> int:
    """About how many tokens a prompt has."""
    if isinstance(prompt, TextPrompt):
        characters = len(prompt.text)
    elif isinstance(prompt, ChatPrompt):
        characters = sum(len(message.content) for message in prompt.messages)
    else:
        return len(prompt.ids)
    return 1 + characters // _CHARACTERS_PER_TOKEN


def _chat_start(prompt: ChatPrompt) -> str:
    start = ""
    for message in prompt.messages:
        start += f"{message.role}\n{message.content}\n"
        if len(start) >= _KEY_CHARACTERS:
            break
    return start[:_KEY_CHARACTERS]
