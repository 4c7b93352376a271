"""The hybrid drafter: matches where they pay and the model elsewhere, row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftgate.contract import DraftSource
from draftgate.engine import Target
from draftgate.engine.drafters import (
    Draft,
    Drafter,
    DraftQuery,
    EagleDrafter,
    EagleHead,
    HybridDrafter,
    NgramDrafter,
    Settled,
)
from draftgate.engine.sampler import RowSampler
from draftgate.sampling import SamplingParams
from tests.support.eagle import write_drafter
from tests.support.engine import ScriptedDrafter, Stream, greedy, running, use_drafter
from tests.support.speculation import PROMPTS, VARIED, PacedDrafter, alone, oracle, sometimes_right
from tests.support.tiny_models import TINY

COUNT = 4
MODEL = (90, 91, 92, 93)
"""What the stand-in for the model drafts: tokens that no row here has."""


class Play:
    """Rows whose every step and what became of its draft the test decides."""

    def __init__(self) -> None:
        self.drafter = HybridDrafter(
            NgramDrafter(1, 6),
            ScriptedDrafter(lambda query: Draft(MODEL[: query.count]), DraftSource.EAGLE),
        )
        self.rows: dict[int, list[int]] = {}

    def start(self, row_id: int, tokens: Sequence[int]) -> None:
        self.rows[row_id] = list(tokens)
        self._settle(row_id, 0, Draft(), len(tokens) - 1)

    def propose(self, *row_ids: int, count: int = COUNT) -> list[Draft]:
        params = SamplingParams(max_tokens=1000, temperature=0.0)
        queries = []
        for row_id in row_ids:
            sampler = RowSampler(params, self.rows[row_id], [], 100, torch.device("cpu"))
            queries.append(DraftQuery(row_id, row_id, self.rows[row_id], count, sampler))
        return self.drafter.propose(queries)

    def settle(self, row_id: int, draft: Draft, accepted: int, then: int) -> None:
        """So many of the drafted tokens are accepted, and the target's own follows."""
        tokens = self.rows[row_id]
        start = len(tokens) - 1
        tokens.extend((*draft.token_ids[:accepted], then))
        self._settle(row_id, start, draft, len(tokens) - 1)

    def _settle(self, row_id: int, start: int, draft: Draft, computed: int) -> None:
        tokens = self.rows[row_id]
        packed = range(computed - start)
        row = Settled(row_id, row_id, tokens, start, computed, packed, draft)
        self.drafter.observe([row], None)
        assert self.drafter.synced_upto(row_id) == len(tokens)

    def step(
        self, row_id: int, *, ngram: int = 0, model: int = 0, count: int = COUNT
    ) -> DraftSource:
        """Draft, accept so many tokens of who did, and go on through CYCLE."""
        [draft] = self.propose(row_id, count=count)
        accepted = min(ngram if draft.source is DraftSource.NGRAM else model, count)
        last = [*self.rows[row_id], *draft.token_ids[:accepted]][-1]
        self.settle(row_id, draft, accepted, (last + 1) % 8 if last < 8 else 0)
        return draft.source


CYCLE = tuple(range(8)) * 3
"""Every match is as long as may be."""


def test_a_long_match_is_followed_and_the_model_drafts_where_there_is_none() -> None:
    play = Play()
    play.start(0, CYCLE)
    play.start(1, range(20, 60))
    followed, drafted = play.propose(0, 1)
    assert (followed.source, followed.token_ids) == (DraftSource.NGRAM, (0, 1, 2, 3))
    assert (drafted.source, drafted.token_ids) == (DraftSource.EAGLE, MODEL)
    # In the order asked for, whoever drafts.
    assert play.propose(1, 0) == [drafted, followed]


def test_a_short_match_is_left_to_the_model_until_such_have_paid() -> None:
    play = Play()
    play.start(0, [1, 2, 3, 50, 1])
    [draft] = play.propose(0)
    assert draft.source is DraftSource.EAGLE
    # The model is never right; the target goes on to repeat what followed.
    sources = []
    for _ in range(12):
        [draft] = play.propose(0)
        play.settle(0, draft, 0, 7 if play.rows[0][-1] == 1 else 1)
        sources.append(draft.source)
    assert sources[0] is DraftSource.EAGLE
    assert sources[-1] is DraftSource.NGRAM


@pytest.mark.parametrize("other", [0, 4])
def test_a_source_that_keeps_failing_is_left(other: int) -> None:
    """Matches are long and always wrong: the model takes over, unless it is no better."""
    play = Play()
    play.start(0, CYCLE)
    sources = [play.step(0, ngram=0, model=other) for _ in range(30)]
    first = sources.index(DraftSource.EAGLE)
    assert 1 <= first <= 6
    later = sources[10:]
    if other:
        assert later.count(DraftSource.EAGLE) > 0.6 * len(later)
    else:
        assert {DraftSource.NGRAM, DraftSource.EAGLE} <= set(sources)


def test_what_happened_long_ago_is_forgotten() -> None:
    """As many failures weigh the same after 200 right steps as after 20."""

    def steps_until_left(right: int) -> int:
        play = Play()
        play.start(0, CYCLE)
        for _ in range(right):
            assert play.step(0, ngram=COUNT) is DraftSource.NGRAM
        for steps in range(60):
            if play.step(0) is DraftSource.EAGLE:
                return steps
        raise AssertionError("never left")

    soon = steps_until_left(1)
    assert soon < steps_until_left(30) == steps_until_left(200) <= 20


def test_rows_learn_apart() -> None:
    """What one row's matches were worth says nothing about another's."""
    play = Play()
    play.start(0, CYCLE)
    play.start(1, CYCLE)
    failing = []
    for _ in range(20):
        failing.append(play.step(0))
        assert play.step(1, ngram=COUNT) is DraftSource.NGRAM
    other = Play()
    other.start(0, CYCLE)
    assert failing == [other.step(0) for _ in range(20)]
    assert DraftSource.EAGLE in failing
    # A row of the same number that comes later starts afresh.
    play.drafter.reset(0)
    play.start(0, CYCLE)
    assert failing == [play.step(0) for _ in range(20)]


def test_the_choice_is_a_function_of_past_steps() -> None:
    """Whatever the model would draft, and however often it is asked, the choice is the same."""
    random = np.random.default_rng(0)

    def model(query: DraftQuery) -> Draft:
        return Draft(tuple(random.integers(60, 90, query.count).tolist()))

    play = Play()
    play.start(0, CYCLE)
    for _ in range(40):
        twin = Play()
        twin.drafter = copy.deepcopy(play.drafter)
        twin.drafter._model.rule = model  # type: ignore[attr-defined]
        twin.rows = copy.deepcopy(play.rows)
        choices = [twin.propose(0)[0].source for _ in range(5)]
        assert choices == [play.propose(0)[0].source] * 5
        accepted = int(random.integers(COUNT + 1))
        play.step(0, ngram=accepted, model=accepted)


@given(st.lists(st.tuples(st.integers(1, COUNT), st.integers(0, COUNT)), max_size=30))
def test_who_drafts_does_not_hang_on_how_much(steps: list[tuple[int, int]]) -> None:
    """The gate changes the length all the time: a source whose drafts were short for a while is not
    worth less than one whose drafts were long."""
    play = Play()
    play.start(0, CYCLE)
    for count, accepted in steps:
        choices = {play.propose(0, count=each)[0].source for each in range(1, COUNT + 1)}
        assert len(choices) == 1
        play.step(0, ngram=accepted, model=COUNT - accepted, count=count)


def test_a_source_learned_in_short_drafts_is_known_in_long_ones() -> None:
    """Matches fail, the model is right: with one token a draft as with four."""
    for count in (1, COUNT):
        play = Play()
        play.start(0, CYCLE)
        for _ in range(30):
            play.step(0, model=count, count=count)
        following = [play.step(0, model=COUNT) for _ in range(10)]
        assert following.count(DraftSource.EAGLE) >= 7, count


def test_steps_without_drafts_teach_nothing() -> None:
    play = Play()
    play.start(0, CYCLE)
    for _ in range(50):
        # It was drafted for, and there was no room.
        assert play.propose(0)[0].source is DraftSource.NGRAM
        play.settle(0, Draft(), 0, (play.rows[0][-1] + 1) % 8)
    assert play.propose(0)[0].source is DraftSource.NGRAM


# In the engine


def drafted_by(stream: Stream) -> list[DraftSource]:
    return [o.verify_step.source for o in stream.outputs if o.verify_step is not None]


def test_each_verify_step_says_who_drafted(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain greedy soon repeats itself, where matches take over; with penalties it never does."""
    settled, varied = greedy(40), VARIED
    following = {True: oracle(alone(tiny, settled)), False: oracle(alone(tiny, varied))}

    def right(query: DraftQuery) -> Draft:
        return Draft(tuple(following[not query.sampler.params.has_penalties](query)))

    asked: list[tuple[int, int]] = []

    def model(query: DraftQuery) -> Draft:
        asked.append((query.row_id, len(query.tokens)))
        draft = right(query)
        return Draft(draft.token_ids[:1])

    use_drafter(
        monkeypatch,
        HybridDrafter(NgramDrafter(2, 4), ScriptedDrafter(model, DraftSource.EAGLE)),
    )
    with running(tiny, started=False, draft_len=4) as engine:
        plain = [engine.submit(f"p{name}", ids, settled) for name, ids in PROMPTS.items()]
        penalised = [engine.submit(f"v{name}", ids, varied) for name, ids in PROMPTS.items()]
        engine.engine.start()
        for stream in (*plain, *penalised):
            stream.wait()
    sources = {s.request.request_id: drafted_by(s) for s in (*plain, *penalised)}
    said = sum(row.count(DraftSource.EAGLE) for row in sources.values())
    assert said == len(asked)
    assert {source for row in sources.values() for source in row} == {
        DraftSource.NGRAM,
        DraftSource.EAGLE,
    }
    followed = {name: row.count(DraftSource.NGRAM) / len(row) for name, row in sources.items()}
    assert all(followed[f"p{name}"] > followed[f"v{name}"] for name in PROMPTS)


def test_the_model_keeps_in_step_while_matches_are_followed(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its turn comes, it drafts what it would have drafted had it always been its turn."""
    folder = write_drafter(tmp_path / "drafter", TINY, draft_vocab=40)
    right = sometimes_right(oracle(alone(tiny, VARIED)), seed=1, share=0.3)

    def drafts_of(wrapped: Callable[[EagleDrafter], Drafter]) -> dict[tuple[int, int], Draft]:
        """The model's drafts, by row and by how many tokens it had."""
        seen: dict[tuple[int, int], Draft] = {}

        def note(query: DraftQuery, draft: Draft) -> Draft:
            if draft.source is DraftSource.EAGLE:
                seen[query.row_id, len(query.tokens)] = draft
            return right(query, draft)

        drafter = wrapped(EagleDrafter(EagleHead(folder, tiny), 1))
        use_drafter(monkeypatch, PacedDrafter(drafter, lambda query: query.count, note))
        with running(tiny, started=False, draft_len=3) as engine:
            streams = [engine.submit(name, ids, VARIED) for name, ids in PROMPTS.items()]
            engine.engine.start()
            for stream in streams:
                stream.wait()
        return seen

    alone_drafted = drafts_of(lambda eagle: eagle)
    drafted = drafts_of(lambda eagle: HybridDrafter(NgramDrafter(1, 4), eagle))
    common = drafted.keys() & alone_drafted.keys()
    assert len(common) > 20
    assert all(drafted[key].token_ids == alone_drafted[key].token_ids for key in common)
