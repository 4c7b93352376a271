"""Drafts for the rows where they are likeliest to stand, as far as they pay in this step.

Each place of each row's draft is a slot; its worth is how likely the token there is to stand. The
best b slots are taken (DSpark, algorithm 1, is a law of this kind). A row's places fall in worth,
so the best slots of a row are always its first ones.

b is where tokens - rate * time is the most, rate being the tokens a second that the draft length
brings on average: so tokens over time become the most over many steps, of which some have prompt
chunks and little room before the next cliff. For steps that are all alike that is the b with the
most tokens over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftgate.speculation.load import Load
from draftgate.speculation.means import Mix
from draftgate.speculation.pass_times import CorrectedTimes

__all__ = ["Slots"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_LEVELS = 32
"""Budgets that are tried for each draft length before one is chosen, those at the table's points
apart; for that one all are."""

_ROUNDS = 2
"""How often a rate is put right by what its own budgets bring (Dinkelbach's method); the first is
that of one budget for all steps."""


@dataclass(frozen=True)
class Slots:
    """The places of all drafts, the likeliest to stand first."""

    survival: _Floats
    """[slots]"""
    rows: _Ints
    """[slots]: whose, by place in the load."""
    places: _Ints
    """[slots]: where in the row's draft, from 1 on."""

    @classmethod
    def of(cls, survival: _Floats, able: npt.NDArray[np.bool_]) -> Slots:
        """survival: [rows, places]; able: where a row may draft."""
        # By place first: of equals the earlier place comes first, so a row's slots are in order.
        places, rows = np.nonzero(able.T)
        worth = survival.T[places, rows]
        order = np.argsort(-worth, kind="stable")
        return cls(worth[order], rows[order], places[order] + 1)

    def best(
        self, times: CorrectedTimes, load: Load, draft_lens: Sequence[int], mix: Mix
    ) -> tuple[_Floats, _Floats]:
        """Tokens and milliseconds of a step, [draft lengths, 1 + mix]: of the one that is about to
        run and of each kind in the mix, with about the best number of slots for each."""
        chunks = np.array([load.prefill_tokens, *mix.tokens])
        taken, tokens = self._sums(load, draft_lens)
        ends = self._ends(times, len(load.rows) + chunks[1:], taken)
        taken = np.take_along_axis(taken, ends, axis=1)
        tokens = np.take_along_axis(tokens, ends, axis=1)
        times_ms = self._times_ms(times, load, draft_lens, chunks, taken)
        usual_ms = times_ms[..., 1:] @ mix.shares
        rate = (tokens / usual_ms).max(axis=1)
        for _ in range(_ROUNDS):
            level = np.argmax(tokens[..., None] - rate[:, None, None] * times_ms, axis=1)
            brought = np.take_along_axis(tokens, level, axis=1)
            took_ms = np.take_along_axis(times_ms, level[:, None], axis=1)[:, 0]
            rate = (brought[:, 1:] @ mix.shares) / (took_ms[:, 1:] @ mix.shares)
        return brought, took_ms

    def grant(
        self, times: CorrectedTimes, load: Load, draft_len: int, tokens_per_ms: float
    ) -> _Ints:
        """[rows]: drafted tokens of each row in the step that is about to run, at most `draft_len`.

        tokens_per_ms: what the draft length brings on average.
        """
        taken, tokens = self._sums(load, [draft_len])
        chunk = np.array([load.prefill_tokens])
        times_ms = self._times_ms(times, load, [draft_len], chunk, taken)[..., 0]
        end = int(np.argmax(tokens - tokens_per_ms * times_ms))
        kept = self.places[:end] <= draft_len
        return np.bincount(self.rows[:end][kept], minlength=len(load.rows))

    def _sums(self, load: Load, draft_lens: Sequence[int]) -> tuple[_Ints, _Floats]:
        """[draft lengths, slots + 1]: how many of the first so many slots the draft length has, and
        the tokens that a step with them is expected to emit."""
        has = self.places <= np.array(draft_lens)[:, None]
        taken = np.zeros((len(draft_lens), len(self.places) + 1), dtype=np.int64)
        tokens = np.full(taken.shape, float(len(load.rows)))
        np.cumsum(has, axis=1, out=taken[:, 1:])
        tokens[:, 1:] += np.cumsum(np.where(has, self.survival, 0.0), axis=1)
        return taken, tokens

    def _ends(self, times: CorrectedTimes, plain_tokens: _Floats, taken: _Ints) -> _Ints:
        """[draft lengths, any]: budgets to try, as numbers of slots: some evenly apart, and those
        that just reach a point of the table."""
        count = taken.shape[1]
        even = np.linspace(0, count - 1, _LEVELS + 1).astype(np.int64)
        room = (times.points[:, None] - plain_tokens).ravel()
        room = room[(room >= 0) & (room < count)]
        # All rows at once, one behind the other on one line.
        apart = np.arange(len(taken))[:, None] * count
        reached = np.searchsorted((taken + apart).ravel(), room + apart, side="right") - 1
        reached = np.clip(reached - apart, 0, count - 1)
        return np.concatenate([np.broadcast_to(even, (len(taken), len(even))), reached], axis=1)

    def _times_ms(
        self,
        times: CorrectedTimes,
        load: Load,
        draft_lens: Sequence[int],
        chunks: _Floats,
        taken: _Ints,
    ) -> _Floats:
        """[draft lengths, ends, chunks]"""
        in_pass = (len(load.rows) + taken)[..., None] + chunks
        full = np.maximum(len(load.rows) * np.array(draft_lens), 1)
        share = (taken / full[:, None])[..., None]
        return times.ms(draft_lens, in_pass, load.kv_tokens, share)
