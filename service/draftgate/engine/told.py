"""What a step has to tell of a row: to its drafter, to the gate, to its client."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from draftgate.contract import FinishReason
from draftgate.engine.drafters import Draft, DraftQuery, Settled
from draftgate.engine.request import Output
from draftgate.engine.sequence import Sequence
from draftgate.speculation import Outcome

__all__ = ["accepted_first", "guessed", "outcome", "query", "settled"]


def query(sequence: Sequence, count: int) -> DraftQuery:
    """What to ask the drafter for it."""
    assert sequence.slot is not None
    return DraftQuery(
        row_id=sequence.row_id,
        slot=sequence.slot,
        tokens=sequence.tokens,
        count=count,
        sampler=sequence.sampler,
    )


def settled(sequence: Sequence, draft: Draft, start: int, places: ListOf[int]) -> Settled:
    """What to tell the drafter of a row that had begun at `start`, after its tokens are emitted.
    places: where in the pass its own tokens were and its drafts that stood, of which the last may
    have been cut off."""
    assert sequence.slot is not None
    return Settled(
        row_id=sequence.row_id,
        slot=sequence.slot,
        tokens=sequence.tokens,
        start=start,
        computed=sequence.computed,
        packed=places[: sequence.computed - start],
        draft=draft,
    )


def outcome(sequence: Sequence, draft: Draft, standing: ListOf[int], output: Output) -> Outcome:
    """What the draft says about acceptance. standing: the drafts that stood before the generation
    may have ended with one of them, behind which nothing is known."""
    emitted = standing[: len(output.token_ids)]
    ended = output.finish_reason is not FinishReason.NONE and len(emitted) == len(output.token_ids)
    return Outcome(
        row_id=sequence.row_id,
        source=int(draft.source),
        drafted=len(draft.token_ids),
        accepted=emitted,
        valid=emitted[-1] + 1 if ended and emitted else None,
    )


def guessed(sequence: Sequence, guess: Draft, output: Output) -> Outcome:
    """What a draft that nobody verified says: whether the target emitted its first token."""
    return Outcome(
        row_id=sequence.row_id,
        source=int(guess.source),
        drafted=1,
        accepted=(0,) if guess.token_ids[0] == output.token_ids[0] else (),
        shadow=True,
    )


def accepted_first(draft: Draft, accepted: ListOf[int]) -> tuple[int, ...]:
    """The drafted tokens as a client is told of them: what was accepted, then the others."""
    if not draft.tree:
        return draft.token_ids
    others = [place for place in range(len(draft.token_ids)) if place not in accepted]
    return tuple(draft.token_ids[place] for place in (*accepted, *others))
