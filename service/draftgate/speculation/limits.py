"""How far each row may draft, whatever pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftgate.contract import GateReason
from draftgate.speculation.load import Load

__all__ = ["RowLimits"]


@dataclass(frozen=True)
class RowLimits:
    """How many tokens each row may draft at most."""

    load: Load
    row_ids: list[int]
    lens: npt.NDArray[np.int64]
    """[rows]"""
    shortest: int
    """The least of them."""

    @classmethod
    def of(cls, load: Load, highest: int) -> RowLimits:
        """highest: what any row may draft."""
        rows = load.rows
        lens = [
            min(row.left, highest) if row.cap is None else min(row.left, highest, row.cap)
            for row in rows
        ]
        shortest = min(lens, default=0)
        if shortest < 0:
            lens = [max(each, 0) for each in lens]
            shortest = 0
        return cls(load, [row.row_id for row in rows], np.array(lens, dtype=np.int64), shortest)

    def alike(self, other: RowLimits) -> bool:
        """Whether the other's are of the same rows, beside as many prompt tokens."""
        return (
            self.row_ids == other.row_ids
            and self.load.prefill_tokens == other.load.prefill_tokens
            and bool(np.array_equal(self.lens, other.lens))
        )

    def reason(self, place: int) -> GateReason:
        """What keeps the row below the others."""
        row = self.load.rows[place]
        if row.cap is not None and row.cap <= row.left:
            return GateReason.REQUEST_CAP
        return GateReason.BUDGET
