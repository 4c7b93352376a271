"""What operators see and say: the gate and the replicas, free of protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from draftgate.contract import DraftSource, GateReason

__all__ = [
    "GateAcceptance",
    "GateCandidate",
    "GateCorrection",
    "GateCosts",
    "GateMode",
    "GateOutcome",
    "GatePolicy",
    "GateReasonCount",
    "GateState",
    "GateStep",
    "GateSteps",
    "LogLevel",
    "Replica",
    "ReplicaState",
]


class GateMode(StrEnum):
    """Who decides the draft length."""

    AUTO = "auto"
    """The gate, by load."""
    OFF = "off"
    """Nobody drafts."""
    FIXED = "fixed"
    """`GatePolicy.draft_len`, whatever the load."""


@dataclass(frozen=True)
class GatePolicy:
    """What an operator wants of the gate, all of it: None is no limit."""

    mode: GateMode = GateMode.AUTO
    draft_len: int | None = None
    """For the mode FIXED, and for no other."""
    max_draft_len: int | None = None
    """Most drafted tokens of a row in a step."""
    max_step_ms: float | None = None
    """Ceiling on a step's time, so on the gap between two chunks of a stream."""
    max_tpot_ms: float | None = None
    """Wish for the mean time per output token of a row."""


@dataclass(frozen=True)
class GateCandidate:
    """A draft length that was weighed for the last step."""

    draft_len: int
    tokens: float
    """Expected of all rows together."""
    step_ms: float


@dataclass(frozen=True)
class GateAcceptance:
    """Conditional acceptance of a drafter's places over all rows."""

    draft_source: DraftSource
    rates: tuple[float, ...]


@dataclass(frozen=True)
class GateReasonCount:
    """How many steps had a reason."""

    reason: GateReason
    steps: int


@dataclass(frozen=True)
class GateCorrection:
    """What steps really took over what the table says."""

    tokens: int
    """Fewest tokens in the pass of these steps; they reach to the next correction's."""
    drafted: bool
    ratio: float
    observations: float


@dataclass(frozen=True)
class GateCosts:
    """Where the step times come from."""

    source: str
    age_s: float | None
    """Since it was measured."""
    corrections: tuple[GateCorrection, ...]


@dataclass(frozen=True)
class GateState:
    """What a gate does and knows."""

    policy: GatePolicy
    draft_len: int
    """K of the last step."""
    reason: GateReason
    """Why it was that."""
    rows: int
    """Rows that decoded in the last step."""
    steps: int
    switches: int
    """How often K changed."""
    expected_step_ms: float | None
    """Of the last step; None where no step times are known."""
    measured_step_ms: float
    expected_speedup: float | None
    """Tokens a second over those without drafts; None where nothing was weighed."""
    emitted_tokens: int
    """This and the other totals count since the engine's start."""
    uptime_s: float
    """How long ago that was; a state that has been up for less than the one before is of another
    start."""
    candidates: tuple[GateCandidate, ...]
    acceptance: tuple[GateAcceptance, ...]
    reasons: tuple[GateReasonCount, ...]
    costs: GateCosts | None
    running_rows: int
    """Rows that the engine holds."""
    waiting_rows: int
    kv_used_tokens: int
    kv_total_tokens: int
    verify_steps: int
    """Of all rows."""
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class GateOutcome:
    """What became of one row's draft."""

    draft_source: DraftSource
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class GateStep:
    """One step of the engine."""

    step: int
    """1, 2, 3, ... since the engine's start."""
    time_s: float
    """When it began, since the engine's start."""
    rows: int
    """Rows that decoded."""
    prefill_tokens: int
    """Prompt tokens computed in the same pass."""
    kv_tokens: int
    """Positions that attention read for the rows that decoded."""
    draft_len: int
    reason: GateReason
    drafted_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    outcomes: tuple[GateOutcome, ...]
    """Of each row that drafted."""
    expected_ms: float | None
    """None where no step times are known."""
    measured_ms: float


@dataclass(frozen=True)
class GateSteps:
    """Steps in order, without gaps."""

    steps: tuple[GateStep, ...]
    lost: int
    """Steps just before these that the engine no longer had."""


class ReplicaState(StrEnum):
    """How a replica is used."""

    UNSPECIFIED = "unspecified"
    """Also a state that this version does not know."""
    NOT_READY = "not_ready"
    """It does not answer, or its models are not loaded."""
    READY = "ready"
    PROBATION = "probation"
    """It was ejected and emits again: the next failure ejects it for longer."""
    EJECTED = "ejected"
    """It lost generations or let them stall; used where nothing else is left."""
    DRAINING = "draining"
    """It gets nothing new."""


@dataclass(frozen=True)
class Replica:
    """A model server behind the gateway."""

    address: str
    """host:port"""
    state: ReplicaState
    reason: str
    """Why it is not ready."""
    generations: int
    """Generations that run on it."""
    outstanding_tokens: int
    """Tokens of their prompts still to read and tokens that they may still emit."""
    ejections: int
    resumes: int
    """Generations that it lost and that went on from what had been emitted."""
    model: str
    """Empty while it is not ready."""


class LogLevel(StrEnum):
    """How much the gateway logs."""

    UNSPECIFIED = "unspecified"
    """Only in answers: a level that this version does not know."""
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
