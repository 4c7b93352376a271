"""Drafts that branch: their shape, their search, their verification, and nothing lost by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from draftgate.contract import DraftSource, FinishReason
from draftgate.engine import EngineConfig, Output, Target
from draftgate.engine import attention as attention_module
from draftgate.engine import step as step_module
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft, DraftQuery
from draftgate.engine.drafters.branches import Branches
from draftgate.engine.kv_cache import KVCache, KVStore
from draftgate.engine.sampler import RowSampler
from draftgate.engine.tree import chain_parents, depths, paths
from draftgate.engine.verify import verify_equal
from draftgate.sampling import SamplingParams
from tests.support.drafters import query
from tests.support.engine import ScriptedDrafter, Stream, greedy, running, sampled, use_drafter
from tests.support.kv_cache import KV_SHAPE
from tests.support.speculation import PROMPTS, VARIED, alone, branching, oracle
from tests.support.tiny_models import BLOCK_BYTES

VOCAB = 5
"""So few tokens that branches are often right."""


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> tuple[list[int], list[int]]:
    """Parents and tokens; no parent has two children alike."""
    parents: list[int] = []
    tokens: list[int] = []
    for place in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, place - 1))
        token = draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(min(parent, len(parents) - 1))
            tokens.append(token)
    kept = dict.fromkeys(zip(parents, tokens, strict=True))
    if len(kept) < len(parents):
        return [], []
    return parents, tokens


def leads_to(parents: Sequence[int], place: int) -> list[int]:
    path = []
    while place >= 0:
        path.insert(0, place)
        place = parents[place]
    return path


@given(trees())
def test_depths_and_paths_follow_the_parents(tree: tuple[list[int], list[int]]) -> None:
    parents, _ = tree
    expected = [leads_to(parents, place) for place in range(len(parents))]
    assert paths(parents) == expected
    assert depths(parents) == [len(path) for path in expected]


def test_a_chain_is_a_tree() -> None:
    assert list(chain_parents(4)) == [-1, 0, 1, 2]
    assert depths(chain_parents(4)) == [1, 2, 3, 4]


#


@given(trees(), st.lists(st.integers(0, VOCAB - 1), min_size=10, max_size=10))
def test_the_path_of_the_targets_own_tokens_stands(
    tree: tuple[list[int], list[int]], chosen: list[int]
) -> None:
    parents, tokens = tree
    chosen = chosen[: len(tokens) + 1]
    standing, last = verify_equal(chosen, tokens, parents)
    assert all(standing == leads_to(parents, standing[-1]) for _ in standing[:1])
    emitted = [tokens[place] for place in standing] + [last]
    for place, token in zip([-1, *standing], emitted, strict=True):
        assert token == chosen[place + 1]
    end = standing[-1] if standing else -1
    children = {tokens[place] for place, parent in enumerate(parents) if parent == end}
    assert last not in children


@given(trees(most=6))
def test_penalties_count_the_path_to_each_draft(tree: tuple[list[int], list[int]]) -> None:
    parents, tokens = tree
    params = SamplingParams(
        max_tokens=9, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6
    )
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    row = RowSampler(params, [1], [2, 2], VOCAB, torch.device("cpu"))
    together = row.probabilities(logits.repeat(len(tokens) + 1, 1), tokens, parents)
    for place, got in zip(range(-1, len(tokens)), together, strict=True):
        emitted = RowSampler(params, [1], [2, 2], VOCAB, torch.device("cpu"))
        emitted.observe([tokens[above] for above in leads_to(parents, place)])
        torch.testing.assert_close(got, emitted.probabilities(logits, [])[0])


# Search


def table(seed: int, sharp: float) -> Callable[[tuple[int, ...]], np.ndarray]:
    """A drafter: the log-likelihoods after each path."""

    def logs(path: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng([seed, *path])
        scores = random.normal(size=VOCAB) * sharp
        return scores - np.log(np.exp(scores).sum())

    return logs


def search(logs: Callable[[tuple[int, ...]], np.ndarray], count: int, width: int) -> Branches:
    found = Branches(query([1, 2], count), count)
    numbers = [-1]
    while numbers:
        nodes = found.nodes
        tokens, values = [], []
        for number in numbers:
            path: tuple[int, ...] = ()
            at = number
            while at >= 0:
                path = (nodes[at].token, *path)
                at = nodes[at].parent
            after = logs(path)
            best = np.argsort(-after)[:width]
            tokens.append(best.tolist())
            values.append(after[best].tolist())
        found.add_level(numbers, tokens, values)
        numbers = found.next_level(width, 1000)
    return found


@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from([0.5, 2.0, 6.0]))
def test_the_tree_holds_the_likeliest_tokens(seed: int, count: int, sharp: float) -> None:
    """With no limit on the width: those of all paths of up to `count` tokens."""
    logs = table(seed, sharp)
    draft = search(logs, count, 1000).draft(DraftSource.EAGLE)
    tokens = draft.token_ids
    drafted = {tuple(tokens[above] for above in path): path for path in paths(list(draft.parents))}
    assert len(drafted) == len(tokens) == count
    # The likeliest first, over everything there is: a path can be no likelier than its beginning.
    waiting: dict[tuple[int, ...], float] = {(): 0.0}
    expected: set[tuple[int, ...]] = set()
    while len(expected) <= count:
        path = max(waiting, key=lambda p: waiting[p])
        likelihood = waiting.pop(path)
        expected.add(path)
        after = logs(path)
        waiting |= {(*path, token): likelihood + after[token] for token in range(VOCAB)}
    assert set(drafted) == expected - {()}


@given(st.integers(0, 10_000), st.integers(1, 12), st.data())
def test_a_trees_beginning_is_the_tree_of_fewer_tokens(
    seed: int, count: int, data: st.DataObject
) -> None:
    logs = table(seed, 2.0)
    whole = search(logs, count, 1000).draft(DraftSource.EAGLE)
    fewer = data.draw(st.integers(1, count))
    part = search(logs, fewer, 1000).draft(DraftSource.EAGLE)
    assert part.token_ids == whole.token_ids[:fewer]
    assert list(part.parents) == list(whole.parents)[:fewer]


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4))
def test_a_narrow_tree_is_no_wider_and_one_wide_is_the_greedy_chain(
    seed: int, count: int, width: int
) -> None:
    logs = table(seed, 2.0)
    found = search(logs, count, width)
    draft = found.draft(DraftSource.EAGLE)
    parents = list(draft.parents)
    assert all(parents.count(parent) <= width for parent in parents)
    if width == 1:
        assert draft.tree == ()
        path: tuple[int, ...] = ()
        for token in draft.token_ids:
            assert token == int(logs(path).argmax())
            path = (*path, token)


def test_what_cannot_follow_is_not_drafted() -> None:
    found = Branches(query([1, 2], 3), 3)
    found.add_level([-1], [[7, 8, 9]], [[-0.1, -2.3, -math.inf]])
    assert found.next_level(4, 100) == [0, 1]
    found.add_level([0, 1], [[1], [2]], [[-math.inf], [-math.inf]])
    assert found.next_level(4, 100) == []
    assert found.draft(DraftSource.EAGLE).token_ids == (7, 8)


def test_no_level_is_read_that_changes_nothing() -> None:
    """Two tokens of probability one half: what follows them is no likelier."""
    found = Branches(query([1, 2], 2), 2)
    found.add_level([-1], [[7, 8]], [[math.log(0.5), math.log(0.5)]])
    assert found.next_level(4, 100) == []


def test_no_more_is_read_than_there_is_room_for() -> None:
    found = Branches(query([1, 2], 6), 6)
    found.add_level([-1], [[7, 8, 9]], [[-1.0, -1.1, -1.2]])
    assert found.next_level(4, 2) == [0, 1]
    assert found.read_tree() == [-1, -1]
    found.add_level([0, 1], [[1], [2]], [[-0.1], [-0.1]])
    assert found.next_level(4, 2) == []


# In the engine


WAYS: Mapping[str, SamplingParams] = {
    "greedy": greedy(40),
    "greedy with penalties": VARIED,
    "coupled": sampled(40, temperature=1.2, seed=7, frequency_penalty=0.5, logprobs=2),
}


def differing(target: Target, params: SamplingParams, patch: pytest.MonkeyPatch, seed: int) -> int:
    """How many of the prompts' answers drafting trees changes, while rows join, leave and are put
    back."""
    expected = alone(target, params)
    use_drafter(patch, ScriptedDrafter(branching(oracle(expected), seed)))

    def cancel(stream: Stream, output: Output) -> None:
        if len(stream.tokens) > 9 and output.finish_reason is FinishReason.NONE:
            engine.engine.stop(stream.request.request_id)

    with running(
        target,
        draft_len=8,
        max_batch_rows=4,
        prefill_chunk_tokens=9,
        kv_cache_bytes=12 * BLOCK_BYTES,
    ) as engine:
        streams = {}
        for name, ids in PROMPTS.items():
            engine.submit(f"cancelled {name}", ids, params, on_output=cancel)
            streams[name] = engine.submit(name, ids, params)
        for stream in streams.values():
            stream.wait()
        counters = engine.engine.counters()
    assert counters.preemptions > 0
    assert counters.drafted_tokens / 6 < counters.accepted_tokens < counters.drafted_tokens
    return sum(stream.tokens != expected[name] for name, stream in streams.items())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_trees_change_no_token(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    assert differing(tiny, WAYS[way], monkeypatch, seed) == 0


def _as_they_lie(store: KVStore, slot: int, first: int, places: Sequence[int]) -> None:
    """Leaves the accepted drafts where they were."""


def _along(parents: Sequence[int]) -> list[list[int]]:
    """Every draft sees all before it."""
    return [list(range(place + 1)) for place in range(len(parents))]


def _one_each(parents: Sequence[int]) -> list[int]:
    """Every draft is one position further."""
    return list(range(1, len(parents) + 1))


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (KVStore, "pick", _as_they_lie),
        (attention_module, "paths", _along),
        (attention_module, "depths", _one_each),
        (step_module, "depths", _one_each),
    ],
)
def test_the_check_sees_trees_taken_for_chains(
    tiny: Target, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    way = WAYS["coupled" if owner is step_module else "greedy with penalties"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong)
        with pytest.raises(AssertionError):
            # The oracle may see a row leave its path before the answers are compared.
            assert differing(tiny, way, patch, seed=0) == 0


def test_log_probabilities_are_those_along_the_path(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(VARIED, logprobs=3)
    with running(tiny, drafter="none", max_batch_rows=1) as engine:
        plain = [engine.one(ids, params) for ids in PROMPTS.values()]
    use_drafter(monkeypatch, ScriptedDrafter(branching(oracle(alone(tiny, VARIED)), seed=3)))
    with running(tiny, draft_len=8) as engine:
        branched = [engine.one(ids, params) for ids in PROMPTS.values()]
    for one, other in zip(plain, branched, strict=True):
        assert one.tokens == other.tokens
        for name in ("logprobs", "top_logprobs"):
            mine, its = (
                list(itertools.chain.from_iterable(getattr(o, name) for o in stream.outputs))
                for stream in (one, other)
            )
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-4, atol=1e-4)


def test_a_client_is_told_what_was_accepted_first(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the branch that stood was not the first."""
    following = oracle(alone(tiny, VARIED))

    def rule(asked: DraftQuery) -> Draft:
        right = following(asked)
        if asked.count < 4 or len(right) < 2:
            return Draft()
        wrong = [(token + 1) % 96 for token in right]
        tokens = (wrong[0], right[0], wrong[1], right[1])
        return Draft(tokens, tree=(-1, -1, 1, 1))

    use_drafter(monkeypatch, ScriptedDrafter(rule))
    with running(tiny, draft_len=4) as engine:
        stream = engine.one(PROMPTS["3"], VARIED)
    steps = [output for output in stream.outputs if output.verify_step is not None]
    assert len(steps) > 8
    for output in steps:
        assert output.verify_step is not None
        assert output.verify_step.accepted == 2
        assert output.verify_step.draft_ids[:2] == output.token_ids[:2]
        assert len(set(output.verify_step.draft_ids)) == 4


def test_a_span_says_places_and_positions() -> None:
    chain = RowSpan(0, 10, 3)
    assert (chain.trunk, chain.positions) == (13, [10, 11, 12])
    tree = RowSpan(0, 10, 4, (-1, -1, 1))
    assert (tree.trunk, tree.positions) == (11, [10, 11, 11, 12])
    begun = RowSpan(0, 13, 1, (-1, -1, 1))
    assert (begun.trunk, begun.positions) == (11, [12])


def test_places_are_picked_in_order() -> None:
    config = EngineConfig(max_batch_rows=2, kv_cache_bytes=1 << 24)
    [store] = KVCache([KV_SHAPE], config, 32, torch.float32, torch.device("cpu")).stores
    for layer in range(KV_SHAPE.layers):
        kv = torch.arange(64.0).unsqueeze(1).expand(-1, KV_SHAPE.width)
        store.write(layer, torch.arange(64), kv)
    store.pick(1, 4, [5, 7, 8])
    for layer in range(KV_SHAPE.layers):
        for side in store.read(layer, 1, 2, 10):
            found = side[0, 0, :, 0].tolist()
            assert found == [32, 33, 34, 35, 37, 39, 40, 39, 40, 41]
