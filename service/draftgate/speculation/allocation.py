"""Drafts for the rows where they are likeliest to stand, as far as they pay in this step.

Each place of each row's draft is a slot; its worth is how likely the token there is to stand. The
best b slots are taken (DSpark, algorithm 1, is a law of this kind). A row's places fall in worth,
so the best slots of a row are always its first ones.

b is where tokens - rate * time is the most, rate being the tokens a second that the draft length
brings on average (Dinkelbach's method): so tokens over time become the most over many steps, of
which some have prompt chunks and little room before the next cliff. Where all steps are alike that
is the b with the most tokens over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftgate.speculation.load import Load
from draftgate.speculation.pass_times import PassTimes

__all__ = ["Allotment", "Slots"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_LEVELS = 16
"""Budgets that are tried beside those that just reach a bound of a pass's time."""


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
    def of(cls, survival: _Floats, lens: _Ints) -> Slots:
        """survival: [rows, places]; lens: how far a row may draft."""
        count, longest = survival.shape
        # By place first: of equals the earlier place comes first, so a row's slots are in order.
        able = lens >= np.arange(1, longest + 1)[:, None]
        order = np.argsort(np.where(able, -survival.T, 1.0), axis=None, kind="stable")
        order = order[: int(lens.clip(max=longest).sum())]
        places = order // count
        return cls(survival.T.ravel()[order], order - places * count, places + 1)

    def grant(
        self, times: PassTimes, load: Load, draft_len: int, tokens_per_ms: float
    ) -> tuple[_Ints, float, float]:
        """What each row drafts in the step that is about to run, [rows]; tokens and milliseconds to
        expect of it.

        The slots are those of this draft length. tokens_per_ms: what it brings on average.
        """
        rows, count = len(load.rows), len(self.places)
        taken = np.arange(count + 1)
        tokens = np.zeros(count + 1)
        self.survival.cumsum(out=tokens[1:])
        share = taken / (rows * draft_len)
        places = times.places([draft_len])
        times_ms = times.ms(places, taken + load.plain_tokens, load.kv_tokens, share)
        times_ms[0] = max(times_ms[0], times.step_ms(0, load.plain_tokens, load.kv_tokens, 1.0))
        end = int((tokens - tokens_per_ms * times_ms).argmax())
        lens = np.bincount(self.rows[:end], minlength=rows)
        return lens, rows + float(tokens[end]), float(times_ms[end])


@dataclass(frozen=True)
class Allotment:
    """About the best budget for each draft length and each kind of pass."""

    tokens: _Floats
    """[draft lengths, kinds]: expected of a step."""
    times_ms: _Floats
    """[draft lengths, kinds]: of that step."""

    @classmethod
    def best(
        cls,
        slots: Slots,
        times: PassTimes,
        load: Load,
        draft_lens: Sequence[int],
        chunks: _Ints,
        tokens_per_ms: _Floats,
    ) -> Allotment:
        """chunks: prompt tokens of each kind of pass. tokens_per_ms: what each draft length brings
        on average."""
        rows, count = len(load.rows), len(slots.places)
        lens = np.array(draft_lens)
        # [draft lengths, slots + 1]: how many of the first so many slots each has, and the tokens
        # that a step with them is expected to emit.
        has = slots.places <= lens[:, None]
        taken = np.zeros((len(lens), count + 1), dtype=np.int64)
        tokens = np.full(taken.shape, float(rows))
        np.cumsum(has, axis=1, out=taken[:, 1:])
        np.cumsum(has * slots.survival, axis=1, out=tokens[:, 1:])
        tokens[:, 1:] += rows
        # All draft lengths lie one behind the other on one line, to be looked up at once.
        first = (np.arange(len(lens)) * (count + 1))[:, None, None]
        taken_line, tokens_line = taken.ravel(), tokens.ravel()
        ends = first + _budgets(times, rows + chunks, count)
        ends = np.searchsorted((taken + first[..., 0]).ravel(), ends, side="right") - 1
        tried, brought = taken_line[ends], tokens_line[ends]
        share = tried / np.maximum(rows * lens, 1)[:, None, None]
        in_pass = tried + (rows + chunks)[:, None]
        places = times.places(draft_lens)[:, None, None]
        took_ms = times.ms(places, in_pass, load.kv_tokens, share)
        # Drafting for nobody takes no less than a plain step, whatever a wrong table says of it.
        plain_ms = times.ms(times.places([0]), rows + chunks, load.kv_tokens, None)
        took_ms = np.where(tried > 0, took_ms, np.maximum(took_ms, plain_ms[:, None]))
        level = np.argmax(brought - tokens_per_ms[:, None, None] * took_ms, axis=2)
        chosen = np.arange(level.size) * ends.shape[2] + level.ravel()
        return cls(
            brought.ravel()[chosen].reshape(level.shape),
            took_ms.ravel()[chosen].reshape(level.shape),
        )


def _budgets(times: PassTimes, plain_tokens: _Ints, count: int) -> _Ints:
    """[kinds, any]: numbers of slots to try beside so many tokens."""
    least, most = int(plain_tokens.min()), int(plain_tokens.max()) + count
    first, last = times.bounds.searchsorted([least, most + 1])
    at_bounds = times.bounds[first:last] - plain_tokens[:, None]
    even = np.arange(_LEVELS + 1) * count // _LEVELS
    found = np.empty((len(plain_tokens), len(even) + last - first), dtype=np.int64)
    found[:, : len(even)] = even
    found[:, len(even) :] = at_bounds.clip(0, count)
    return found
