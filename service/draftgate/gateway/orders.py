"""What an operator can order of a running gateway.

An order is a value, so that processes that share the work can hand it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.config import RequestRules

__all__ = ["DrainReplica", "Nothing", "Order", "RefuseNew", "Reload", "SetLogLevel"]


@dataclass(frozen=True)
class RefuseNew:
    """Not serving and no new work from now on; what runs goes on."""

    kind: Literal["refuse_new"] = "refuse_new"


@dataclass(frozen=True)
class DrainReplica:
    """Nothing new for the replica at this address, or take that back."""

    address: str
    draining: bool
    move: bool = False
    """Let what runs on it go on elsewhere now."""
    kind: Literal["drain_replica"] = "drain_replica"


@dataclass(frozen=True)
class SetLogLevel:
    """Log this level of `logging` and worse."""

    level: int
    kind: Literal["set_log_level"] = "set_log_level"


@dataclass(frozen=True)
class Reload:
    """Take up files that have changed, and what is given here: all of it, or nothing if something
    is of no use. None leaves a part as it is."""

    admission: AdmissionConfig | None = None
    rules: RequestRules | None = None
    """For requests that come from now on."""
    kind: Literal["reload"] = "reload"


@dataclass(frozen=True)
class Nothing:
    """Who carries it out is alive."""

    kind: Literal["nothing"] = "nothing"


Order = RefuseNew | DrainReplica | SetLogLevel | Reload | Nothing
