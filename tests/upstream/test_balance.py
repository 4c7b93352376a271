"""The choice of a replica, over numbers of the test's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.text import Message
from draftgate.upstream.balance import (
    Load,
    choose,
    prefix_key,
    prompt_tokens,
    slow_start_weight,
)
from draftgate.upstream.types import ChatPrompt, TextPrompt, TokenPrompt

NAMES = [f"10.0.0.{number}:8001" for number in range(1, 9)]


@st.composite
def loads(draw: st.DrawFn) -> list[Load]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    tokens, weights = st.integers(0, 10**6), st.floats(0.1, 1.0)
    return [Load(name, draw(tokens), draw(weights)) for name in names]


keys = st.binary(min_size=16, max_size=16)


@given(loads(), keys, st.integers(0, 10**5), st.integers(0, 10**5))
def test_nobody_gets_much_more_than_the_least_loaded_would(
    found: list[Load], key: bytes, tokens: int, affinity_tokens: int
) -> None:
    name = choose(found, key=key, tokens=tokens, affinity_tokens=affinity_tokens)
    scores = {load.name: (load.tokens + tokens) / load.weight for load in found}
    assert scores[name] <= min(scores.values()) + affinity_tokens


@given(loads(), keys, st.randoms())
def test_the_order_of_the_replicas_does_not_matter(
    found: list[Load], key: bytes, chance: random.Random
) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)
    one, other = (
        choose(each, key=key, tokens=9, affinity_tokens=64.0) for each in (found, shuffled)
    )
    assert one == other


@given(keys, st.sets(st.sampled_from(NAMES), min_size=2))
def test_a_prefix_stays_where_it_is_while_others_come_and_go(key: bytes, names: set[str]) -> None:
    def preferred(among: set[str]) -> str:
        idle = [Load(name, 0) for name in among]
        return choose(idle, key=key, tokens=1, affinity_tokens=1.0)

    found = preferred(names)
    for lost in names - {found}:
        assert preferred(names - {lost}) == found


def test_different_prefixes_are_spread_over_idle_replicas() -> None:
    for affinity_tokens in (0, 1000):
        counts = dict.fromkeys(NAMES, 0)
        for number in range(4000):
            key = prefix_key(TextPrompt(f"prompt {number}"))
            idle = [Load(name, 0) for name in NAMES]
            counts[choose(idle, key=key, tokens=1, affinity_tokens=affinity_tokens)] += 1
        assert min(counts.values()) > 400  # 500 on average
        assert max(counts.values()) < 600


def test_one_prefix_for_all_is_spread_too() -> None:
    loads = dict.fromkeys(NAMES, 0)
    for _ in range(1000):
        now = [Load(name, tokens) for name, tokens in loads.items()]
        loads[choose(now, key=bytes(16), tokens=100, affinity_tokens=500)] += 100
    assert max(loads.values()) - min(loads.values()) <= 600


def test_a_replica_that_just_came_gets_less() -> None:
    loads = {"old": 0, "new": 0}
    for _ in range(1100):
        now = [Load("old", loads["old"]), Load("new", loads["new"], weight=0.1)]
        loads[choose(now, key=bytes(16), tokens=1, affinity_tokens=0)] += 1
    assert loads == {"old": pytest.approx(1000, abs=20), "new": pytest.approx(100, abs=20)}


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_slow_start_rises_to_a_full_share(age_s: float, slow_start_s: float) -> None:
    weight = slow_start_weight(age_s, slow_start_s)
    assert 0.1 <= weight <= 1.0
    assert weight == 1.0 or age_s < slow_start_s
    assert slow_start_weight(2 * age_s, slow_start_s) >= weight


def test_prompts_with_the_same_beginning_share_a_key() -> None:
    system = "You are helpful. " * 80
    assert prefix_key(TextPrompt(system + "a")) == prefix_key(TextPrompt(system + "b"))
    assert prefix_key(TextPrompt("a")) != prefix_key(TextPrompt("b"))

    def chat(*contents: str) -> ChatPrompt:
        roles = ("system", "user", "assistant", "user")
        return ChatPrompt(tuple(map(Message, roles, contents)))

    assert prefix_key(chat(system, "a")) == prefix_key(chat(system, "b"))
    assert prefix_key(chat("short", "a")) != prefix_key(chat("short", "b"))
    ids = tuple(range(300))
    assert prefix_key(TokenPrompt(ids)) == prefix_key(TokenPrompt((*ids[:256], 7)))
    assert prefix_key(TokenPrompt(ids[:9])) != prefix_key(TokenPrompt(ids[:8]))


def test_a_prompt_is_about_as_long_as_it_is() -> None:
    assert prompt_tokens(TokenPrompt((1, 2, 3))) == 3
    assert prompt_tokens(TextPrompt("x" * 400)) == 101
    chat = ChatPrompt((Message("system", "x" * 40), Message("user", "x" * 360)))
    assert prompt_tokens(chat) == 101
