"""The rows of a replay: how far each is, and which of its drafts stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from draftgate.speculation.load import Outcome, RowLoad
from draftgate.speculation.world import Phase, Requests

__all__ = ["Crowd", "Drafts", "Rows"]

_Ints = npt.NDArray[np.int64]

_TEXT = 4096
"""Places of a text whose luck is drawn at once; it then comes again. A power of two."""

_REQUESTS = 64
"""Requests of a slot that are drawn at once; they then come again."""

_NONE: _Ints = np.zeros(0, dtype=np.int64)

_SOURCE = 1
"""Who drafts, for the laws that ask."""


class Rows(Sequence[RowLoad]):
    """Rows of a load, made into objects only for a law that looks at each."""

    def __init__(self, ids: _Ints, left: _Ints) -> None:
        self.ids = ids
        """[rows]"""
        self.left = left
        """[rows]: as of `RowLoad`."""

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> RowLoad: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RowLoad]: ...
    def __getitem__(self, place: int | slice) -> RowLoad | Sequence[RowLoad]:
        return self._all[place]

    def __iter__(self) -> Iterator[RowLoad]:
        return iter(self._all)

    @cached_property
    def _all(self) -> list[RowLoad]:
        return list(map(RowLoad, self.ids.tolist(), self.left.tolist()))


@dataclass(frozen=True)
class Drafts:
    """What became of a step's drafts."""

    ids: _Ints
    """[rows]"""
    drafted: _Ints
    """[rows]"""
    accepted: _Ints
    """[rows]"""

    def outcomes(self) -> list[Outcome]:
        """Row by row, as an engine tells its gate."""
        return [
            Outcome(row_id, _SOURCE, drafted, range(accepted))
            for row_id, drafted, accepted in zip(
                self.ids.tolist(), self.drafted.tolist(), self.accepted.tolist(), strict=True
            )
            if drafted
        ]


class Crowd:
    """Slots for rows, each with one request after another.

    What a slot's requests are like, and whether a draft could stand at some position of its text,
    depends on the seed alone. So laws that draft differently still meet the same text.
    """

    def __init__(self, requests: Requests, places: int, seed: int) -> None:
        self._seed = seed
        self._places = np.arange(1, places + 1)
        self._phases = 0
        self._next_id = 0
        self._ids = self._left = self._context = self._kind = _NONE
        self._position = self._request = _NONE
        self._back_s = np.zeros(0)
        self.become(requests)

    @property
    def kv_tokens(self) -> int:
        """Of the rows that are here."""
        return int(self._context[self._here].sum())

    def rows(self) -> Rows:
        """Those that decode now."""
        return Rows(self._ids[self._here], self._left[self._here] - 1)

    def become(self, requests: Requests) -> None:
        """Rows are like this from now on."""
        self._requests = requests
        self._rates = np.array([kind.padded(len(self._places)) for kind in requests.kinds])

    def begin(self, phase: Phase, time_s: float) -> list[int]:
        """Another load. Returns the rows that left."""
        random = np.random.default_rng((self._seed, self._phases))
        self._phases += 1
        self._phase = phase
        shares = np.array([kind.share for kind in self._requests.kinds])
        size = (phase.rows, _REQUESTS)
        self._luck = random.random((phase.rows, _TEXT), dtype=np.float32)
        self._first = np.arange(phase.rows)[:, None] * _TEXT
        self._kinds = random.choice(len(shares), size, p=shares / shares.sum())
        self._pauses_s = phase.pause_s * random.exponential(size=size)
        kept = min(phase.rows, len(self._ids))
        gone: list[int] = self._ids[kept:].tolist()
        more = np.arange(self._next_id, self._next_id + phase.rows - kept)
        self._next_id += len(more)
        # At the start rows are anywhere in their output, or they would all end at once.
        left = random.integers(1, self._requests.output_tokens + 1, len(more))
        self._ids = np.concatenate([self._ids[:kept], more])
        self._left = np.concatenate([self._left[:kept], left])
        self._kind = np.concatenate([self._kind[:kept], self._kinds[kept:, 0]])
        self._context = np.full(phase.rows, phase.context_tokens)
        self._position = np.zeros(phase.rows, dtype=np.int64)
        self._request = np.zeros(phase.rows, dtype=np.int64)
        self._back_s = np.full(phase.rows, time_s)
        self._away = False
        self._here: slice | _Ints = slice(None)
        return gone

    def wait(self, time_s: float) -> float:
        """Who is back at this time is here. Returns when somebody is."""
        if self._away:
            time_s = max(time_s, float(self._back_s.min()))
            here = self._back_s <= time_s
            self._away = not here.all()
            self._here = np.flatnonzero(here) if self._away else slice(None)
        return time_s

    def accept(self, lens: _Ints) -> _Ints:
        """How many drafts of each row stand, of so many."""
        longest = int(lens.max(initial=0))
        if not longest:
            return np.zeros_like(lens)
        here = self._here
        columns = (self._position[here, None] + self._places[:longest]) & (_TEXT - 1)
        luck = self._luck.take(columns + self._first[here])
        stands = luck < self._rates[self._kind[here], :longest]
        return np.minimum(np.logical_and.accumulate(stands, axis=1).sum(axis=1), lens)

    def advance(self, accepted: _Ints, time_s: float) -> list[int]:
        """Every row here emits what was accepted and one more. Returns the rows that ended."""
        here = self._here
        emitted = accepted + 1
        self._left[here] -= emitted
        self._context[here] += emitted
        self._position[here] += emitted
        ended = np.flatnonzero(self._left <= 0)
        if not len(ended):
            return []
        gone: list[int] = self._ids[ended].tolist()
        self._ids[ended] = np.arange(self._next_id, self._next_id + len(ended))
        self._next_id += len(ended)
        self._request[ended] += 1
        turn = self._request[ended] % _REQUESTS
        self._kind[ended] = self._kinds[ended, turn]
        self._left[ended] = self._requests.output_tokens
        self._context[ended] = self._phase.context_tokens
        if self._phase.pause_s:
            self._back_s[ended] = time_s + self._pauses_s[ended, turn]
            self._away = True
        return gone
