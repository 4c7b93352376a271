"""The n-gram drafter against a search of the whole history."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from draftgate.engine.drafters import Draft, DraftQuery, NgramDrafter, Settled
from draftgate.engine.sampler import RowSampler
from draftgate.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
"""A small alphabet, so that n-grams come again."""
SIZES = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda s: (s[0], s[0] + s[1]))


def query(row_id: int, tokens: list[int], count: int) -> DraftQuery:
    params = SamplingParams(max_tokens=1000, temperature=0.0)
    sampler = RowSampler(params, tokens, [], 1000, torch.device("cpu"))
    return DraftQuery(row_id=row_id, slot=0, tokens=tokens, count=count, sampler=sampler)


def settle(drafter: NgramDrafter, row_id: int, tokens: list[int], upto: int) -> None:
    """The first `upto` tokens are settled."""
    row = Settled(
        row_id, 0, tokens, start=0, computed=upto - 1, packed=range(upto - 1), draft=Draft()
    )
    drafter.observe([row], None)


def searched(tokens: list[int], shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest matching n-gram."""
    for size in range(longest, shortest - 1, -1):
        if size > len(tokens):
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                drafted: list[int] = []
                while len(drafted) < count:  # what it drafts may itself be what follows
                    drafted.append((tokens + drafted)[end + len(drafted)])
                return tuple(drafted)
    return ()


@settings(max_examples=500)
@given(TOKENS, SIZES, st.integers(1, 8), st.data())
def test_it_follows_the_latest_longest_match(
    tokens: list[int], sizes: tuple[int, int], count: int, data: st.DataObject
) -> None:
    drafter = NgramDrafter(*sizes)
    upto = 0
    while upto < len(tokens):  # prompt chunks and steps of any length
        upto = min(len(tokens), upto + data.draw(st.integers(1, 9)))
        settle(drafter, 7, tokens, upto)
        assert drafter.synced_upto(7) == upto
    [draft] = drafter.propose([query(7, tokens, count)])
    assert draft.token_ids == searched(tokens, *sizes, count)
    assert draft.probabilities is None


@settings(max_examples=200)
@given(TOKENS, TOKENS, st.integers(1, 5))
def test_rows_know_nothing_of_each_other(one: list[int], two: list[int], count: int) -> None:
    drafter = NgramDrafter(2, 4)
    for row_id, tokens in ((1, one), (2, two)):
        settle(drafter, row_id, tokens, len(tokens))
    drafts = drafter.propose([query(2, two, count), query(1, one, count)])
    assert [d.token_ids for d in drafts] == [
        searched(two, 2, 4, count),
        searched(one, 2, 4, count),
    ]


@given(TOKENS)
def test_observing_again_changes_nothing(tokens: list[int]) -> None:
    """As after a preemption, when the row is computed again from its start."""
    drafter = NgramDrafter(1, 3)
    settle(drafter, 0, tokens, len(tokens))
    before = drafter.propose([query(0, tokens, 4)])
    settle(drafter, 0, tokens, 1)
    settle(drafter, 0, tokens, len(tokens))
    assert drafter.synced_upto(0) == len(tokens)
    assert drafter.propose([query(0, tokens, 4)]) == before


def test_a_row_that_is_not_synced_is_not_drafted_for() -> None:
    drafter = NgramDrafter(1, 3)
    tokens = [1, 2, 1, 2, 1]
    settle(drafter, 0, tokens, 4)
    assert drafter.propose([query(0, tokens, 3)])[0].token_ids == ()
    assert drafter.propose([query(9, tokens, 3)])[0].token_ids == ()


def test_reset_forgets_the_row() -> None:
    drafter = NgramDrafter(1, 3)
    settle(drafter, 0, [1, 2, 1], 3)
    settle(drafter, 1, [5, 6, 5], 3)
    drafter.reset(0)
    drafter.reset(0)
    assert drafter.synced_upto(0) == 0
    settle(drafter, 0, [8, 1], 2)
    drafts = drafter.propose([query(0, [8, 1], 2), query(1, [5, 6, 5], 2)])
    assert [d.token_ids for d in drafts] == [(), (6, 5)]
