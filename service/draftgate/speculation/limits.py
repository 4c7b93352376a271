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
    """How many tokens each row may draft at most, and what says so."""

    row_ids: list[int]
    lens: npt.NDArray[np.int64]
    """[rows]"""
    reasons: list[GateReason]
    """Of a row that may draft less than the others."""

    @classmethod
    def of(cls, load: Load, highest: int) -> RowLimits:
        """highest: what any row may draft."""
        lens, reasons = [], []
        for row in load.rows:
            cap = highest if row.cap is None or row.cap > highest else row.cap
            lens.append(max(min(cap, row.left), 0))
            reasons.append(GateReason.BUDGET if row.left < cap else GateReason.REQUEST_CAP)
        return cls([row.row_id for row in load.rows], np.array(lens, dtype=np.int64), reasons)
