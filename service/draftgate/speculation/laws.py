"""Other laws of the draft length, to compare the gate with.

Each is the published idea in a few lines, over the same inputs as the gate; the names are those of
`draftgate gate replay --law`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from draftgate.speculation.costs import CostTable
from draftgate.speculation.gate import Gate
from draftgate.speculation.load import Load, Outcome

__all__ = ["AutoLaw", "EmaLaw", "FixedLaw", "GoodputLaw", "Law", "TableLaw"]


class Law(Protocol):
    """Decides a draft length for every step."""

    def decide(self, load: Load) -> tuple[int, Sequence[int]]:
        """The draft length of the step that is about to run, and the drafted tokens of each row."""
        ...

    def observe(self, outcomes: Sequence[Outcome], load: Load, measured_ms: float) -> None:
        """What came of it."""
        ...

    def forget(self, row_id: int) -> None:
        """The row has left."""
        ...


class AutoLaw:
    """The gate itself."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def decide(self, load: Load) -> tuple[int, Sequence[int]]:
        self._decision = self.gate.decide(load)
        return self._decision.draft_len, self._decision.row_lens

    def observe(self, outcomes: Sequence[Outcome], load: Load, measured_ms: float) -> None:
        self.gate.observe(self._decision, outcomes, load, measured_ms)

    def forget(self, row_id: int) -> None:
        self.gate.forget(row_id)


class _Simple:
    """One draft length for all rows, from the load alone unless `observe` says otherwise."""

    def decide(self, load: Load) -> tuple[int, Sequence[int]]:
        draft_len = self._draft_len(load)
        return draft_len, [min(draft_len, row.left) for row in load.rows]

    def observe(self, outcomes: Sequence[Outcome], load: Load, measured_ms: float) -> None:
        """Nothing is learned."""

    def forget(self, row_id: int) -> None:
        """Nothing is known of rows."""

    def _draft_len(self, load: Load) -> int:
        raise NotImplementedError


class FixedLaw(_Simple):
    """Always the same draft length."""

    def __init__(self, draft_len: int) -> None:
        self.draft_len = draft_len

    def _draft_len(self, load: Load) -> int:
        return self.draft_len


class TableLaw(_Simple):
    """A draft length by batch size, tuned beforehand (TensorRT-LLM's `draft_len_schedule`, vLLM's
    `num_speculative_tokens_per_batch_size`)."""

    def __init__(self, table: Mapping[int, int]) -> None:
        """table: draft length from so many rows on."""
        self._table = dict(sorted(table.items()))

    @classmethod
    def tuned(
        cls, costs: CostTable, survival: Sequence[float], draft_lens: Sequence[int], rows: int
    ) -> TableLaw:
        """The best draft length for every batch size up to `rows`, with costs and S_j as given."""
        table: dict[int, int] = {}
        before = -1
        for batch in range(1, rows + 1):
            best = max(
                draft_lens,
                key=lambda k, b=batch: (  # type: ignore[misc]
                    (1 + sum(survival[:k])) / costs.step_ms(k, b * (k + 1)),
                    -k,
                ),
            )
            if best != before:
                table[batch] = before = best
        return cls(table)

    def _draft_len(self, load: Load) -> int:
        found = 0
        for rows, draft_len in self._table.items():
            if len(load.rows) >= rows:
                found = draft_len
        return found


class EmaLaw(_Simple):
    """SGLang's adaptive speculation: an average of accepted drafts for each class of batch sizes
    moves the draft length along a list, whatever a step costs."""

    _SLOTS = ((64, (0,)), (32, (0, 1)), (8, (0, 1, 3)), (1, (1, 3, 5)))
    _ALPHA = 0.2
    _WARM_UP = 10
    _EVERY = 5
    _HYSTERESIS = 0.0

    def __init__(self, draft_lens: Sequence[int]) -> None:
        self._known = set(draft_lens)
        self._state = {least: [len(lens) - 1, 0.0, 0] for least, lens in self._SLOTS}
        self._slot = 1

    def _draft_len(self, load: Load) -> int:
        self._slot = next(least for least, _ in self._SLOTS if len(load.rows) >= least)
        return self._lens()[int(self._state[self._slot][0])]

    def observe(self, outcomes: Sequence[Outcome], load: Load, measured_ms: float) -> None:
        state, lens = self._state[self._slot], self._lens()
        at = int(state[0])
        drafted = [outcome for outcome in outcomes if outcome.drafted]
        state[2] += 1
        if drafted:
            accepted = float(np.mean([len(outcome.accepted) for outcome in drafted]))
            state[1] += self._ALPHA * (accepted - state[1])
        if state[2] < self._WARM_UP or state[2] % self._EVERY:
            return
        if not drafted:
            # From 0 it always tries again.
            state[0] = min(at + 1, len(lens) - 1)
        elif at > 0 and state[1] <= lens[at - 1] - 0.5 + self._HYSTERESIS:
            state[0] = at - 1
        elif at + 1 < len(lens) and state[1] > lens[at] - 0.5 + self._HYSTERESIS:
            state[0] = at + 1

    def _lens(self) -> Sequence[int]:
        lens = next(lens for least, lens in self._SLOTS if least == self._slot)
        return [draft_len for draft_len in lens if draft_len in self._known or draft_len == 0]


class GoodputLaw(_Simple):
    """SmartSpec (arXiv 2406.14066): one acceptance rate for everything, a profile that nobody
    corrects, and a bias of 1.1 towards no drafts."""

    _BIAS = 1.1
    _START = 0.7
    _FLOOR, _RESET = 0.3, 0.65
    _LEARNT = 0.02

    def __init__(self, costs: CostTable, draft_lens: Sequence[int]) -> None:
        self._costs = costs
        self._draft_lens = [draft_len for draft_len in draft_lens if draft_len in costs.curves]
        self._rate = self._START

    def _draft_len(self, load: Load) -> int:
        def goodput(draft_len: int) -> float:
            rows = len(load.rows)
            tokens = sum(self._rate**place for place in range(draft_len + 1))
            step_ms = self._costs.step_ms(
                draft_len, rows * (draft_len + 1) + load.prefill_tokens, load.kv_tokens
            )
            return tokens / step_ms * (self._BIAS if draft_len == 0 else 1.0)

        return max(self._draft_lens, key=goodput)

    def observe(self, outcomes: Sequence[Outcome], load: Load, measured_ms: float) -> None:
        reached = sum(min(len(o.accepted) + 1, o.drafted) for o in outcomes)
        if reached:
            accepted = sum(len(o.accepted) for o in outcomes)
            self._rate += self._LEARNT * (accepted / reached - self._rate)
            if self._rate < self._FLOOR:
                self._rate = self._RESET
