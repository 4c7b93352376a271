"""Other laws of the draft length, to compare the gate with.

Each is the published idea in a few lines, over the same inputs as the gate; the names are those of
`draftgate gate replay --law`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from draftgate.speculation.costs import CostTable
from draftgate.speculation.crowd import Drafts, Rows
from draftgate.speculation.gate import Decision, Gate
from draftgate.speculation.load import Load

__all__ = ["AutoLaw", "Choice", "EmaLaw", "FixedLaw", "GoodputLaw", "Law", "TableLaw"]


@dataclass(frozen=True)
class Choice:
    """What to draft in a step."""

    draft_len: int
    row_lens: npt.NDArray[np.int64]
    """[rows]: drafted tokens of each row."""


class Law(Protocol):
    """Decides a draft length for every step."""

    def decide(self, load: Load) -> Choice:
        """What to draft in the step that is about to run; its rows are `Rows`."""
        ...

    def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
        """What came of it."""
        ...

    def forget(self, row_id: int) -> None:
        """The row has left."""
        ...


class AutoLaw:
    """The gate itself."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._decision: Decision | None = None

    def decide(self, load: Load) -> Choice:
        self._decision = decision = self.gate.decide(load)
        return Choice(decision.draft_len, np.array(decision.row_lens, dtype=np.int64))

    def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
        assert self._decision is not None
        self.gate.observe(self._decision, drafts.outcomes(), load, measured_ms)

    def forget(self, row_id: int) -> None:
        self.gate.forget(row_id)


class _Uniform:
    """One draft length for all rows, from the load alone unless `observe` says otherwise."""

    def decide(self, load: Load) -> Choice:
        assert isinstance(load.rows, Rows)
        draft_len = self._draft_len(load)
        return Choice(draft_len, np.minimum(load.rows.left, draft_len))

    def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
        """Nothing is learned."""

    def forget(self, row_id: int) -> None:
        """Nothing is known of rows."""

    def _draft_len(self, load: Load) -> int:
        raise NotImplementedError


class FixedLaw(_Uniform):
    """Always the same draft length."""

    def __init__(self, draft_len: int) -> None:
        self._fixed = draft_len

    def _draft_len(self, load: Load) -> int:
        return self._fixed


class TableLaw(_Uniform):
    """A draft length by batch size, set beforehand (TensorRT-LLM's `draft_len_schedule`, vLLM's
    `num_speculative_tokens_per_batch_size`)."""

    def __init__(self, table: Mapping[int, int]) -> None:
        """table: draft length from so many rows on; 0 below the first."""
        self._rows = sorted(table)
        self._lens = [0, *(table[rows] for rows in self._rows)]

    def _draft_len(self, load: Load) -> int:
        return self._lens[bisect_right(self._rows, len(load.rows))]


class EmaLaw(_Uniform):
    """SGLang's adaptive speculation: an average of accepted drafts for each class of batch sizes
    moves the draft length along a list, whatever a step costs."""

    _SLOTS: Mapping[int, Sequence[int]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
    """Draft lengths from so many rows on."""
    _LEARNT = 0.2
    _WARM_UP = 10
    _EVERY = 5
    _RISE, _DROP = -0.5, -0.75
    """To what is added: the present draft length, and the one below."""
    _STOP = 0.5
    """Accepted drafts below which nothing is drafted any more, where that is the one below."""

    def __init__(self, draft_lens: Sequence[int]) -> None:
        """draft_lens: what a slot may have, of its list."""
        self._slots = {
            least: _Slot([k for k in lens if k in draft_lens or not k] or [0])
            for least, lens in self._SLOTS.items()
        }
        self._slot = self._slots[1]

    def _draft_len(self, load: Load) -> int:
        least = max((n for n in self._slots if n <= len(load.rows)), default=1)
        self._slot = self._slots[least]
        return self._slot.draft_len

    def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
        slot, drafted = self._slot, drafts.drafted > 0
        slot.steps += 1
        if drafted.any():
            accepted = float(drafts.accepted[drafted].mean())
            slot.mean += self._LEARNT * (accepted - slot.mean)
        if slot.steps < self._WARM_UP or slot.steps % self._EVERY:
            return
        above, shorter = slot.place + 1 < len(slot.lens), slot.lens[max(slot.place - 1, 0)]
        if slot.draft_len == 0:
            slot.place += above  # from 0 it always tries again
        elif slot.place and slot.mean <= (shorter + self._DROP if shorter else self._STOP):
            slot.place -= 1
        elif above and slot.mean > slot.draft_len + self._RISE:
            slot.place += 1


@dataclass
class _Slot:
    """A class of batch sizes."""

    lens: Sequence[int]
    place: int = -1
    """The present draft length's; at the start the longest."""
    mean: float = 0.0
    """Of accepted drafts."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.place = len(self.lens) - 1
        self.mean = float(self.lens[-1])

    @property
    def draft_len(self) -> int:
        return self.lens[self.place]


class GoodputLaw(_Uniform):
    """SmartSpec (arXiv 2406.14066): one acceptance rate for everything, a profile that nobody
    corrects, and a bias of 1.1 towards no drafts."""

    _BIAS = 1.1
    _START = 0.7
    _FLOOR, _RESET = 0.3, 0.65
    _LEARNT = 0.02

    def __init__(self, costs: CostTable, draft_lens: Sequence[int]) -> None:
        self._costs = costs
        self._draft_lens = [k for k in draft_lens if k in costs.curves]
        self._rate = self._START

    def _draft_len(self, load: Load) -> int:
        def goodput(draft_len: int) -> float:
            tokens = sum(self._rate**place for place in range(draft_len + 1))
            in_pass = len(load.rows) * (draft_len + 1) + load.prefill_tokens
            step_ms = self._costs.step_ms(draft_len, in_pass, load.kv_tokens)
            return tokens / step_ms * (1.0 if draft_len else self._BIAS)

        return max(self._draft_lens, key=goodput)

    def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
        reached = int(np.minimum(drafts.accepted + 1, drafts.drafted).sum())
        if reached:
            self._rate += self._LEARNT * (int(drafts.accepted.sum()) / reached - self._rate)
            if self._rate < self._FLOOR:
                self._rate = self._RESET
