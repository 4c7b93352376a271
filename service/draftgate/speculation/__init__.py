"""When to speculate, and how far: the law of the load gate, as plain arithmetic."""

from __future__ import annotations

from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.costs import CostCurve, CostTable
from draftgate.speculation.gate import Decision, Gate
from draftgate.speculation.load import Load, Outcome, RowLoad
from draftgate.speculation.policy import Mode, Policy
from draftgate.speculation.record import StepRecord
from draftgate.speculation.settings import GateSettings
from draftgate.speculation.state import gate_state
from draftgate.speculation.weighing import Candidate

__all__ = [
    "AcceptanceEstimator",
    "Candidate",
    "CostCurve",
    "CostTable",
    "Decision",
    "Gate",
    "GateSettings",
    "Load",
    "Mode",
    "Outcome",
    "Policy",
    "RowLoad",
    "StepRecord",
    "gate_state",
]
