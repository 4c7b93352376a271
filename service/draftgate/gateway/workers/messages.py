"""What the fleet and a worker say to each other.

A seat is the number that a worker gave to a request for a place; a ticket is the number that either
side gave to an order, for its answer. Both are told apart for each worker only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from draftgate.errors import DraftgateError, ErrorCode, Refusal
from draftgate.gateway.admission import Ask
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.orders import DrainReplica, Nothing, RefuseNew, Reload, SetLogLevel

__all__ = [
    "FROM_WORKER",
    "TO_WORKER",
    "Admitted",
    "Begin",
    "CarriedOut",
    "CarryOut",
    "End",
    "Enter",
    "Failed",
    "Failure",
    "FromWorker",
    "Holds",
    "Leave",
    "Listening",
    "Refused",
    "TellAll",
    "ToWorker",
    "ToldAll",
]

_Order = Annotated[
    RefuseNew | DrainReplica | SetLogLevel | Reload | Nothing, Field(discriminator="kind")
]


@dataclass(frozen=True)
class Failure:
    """A DraftgateError that happened in the other process."""

    code: ErrorCode
    message: str
    field: str = ""
    refusal: Refusal | None = None

    @classmethod
    def of(cls, error: DraftgateError) -> Failure:
        """What there is to say about `error`."""
        return cls(error.code, error.message, error.field, error.refusal)

    def error(self) -> DraftgateError:
        """The same error, to be raised here."""
        return DraftgateError(self.code, self.message, field=self.field, refusal=self.refusal)


@dataclass(frozen=True)
class Listening:
    """The worker serves."""

    kind: Literal["listening"] = "listening"


@dataclass(frozen=True)
class Failed:
    """The worker could not start, and ends."""

    failure: Failure
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Enter:
    """A generation asks for a place; the answer is Admitted or Refused."""

    seat: int
    ask: Ask
    kind: Literal["enter"] = "enter"


@dataclass(frozen=True)
class Leave:
    """It gives its place back, or waits for one no more."""

    seat: int
    used_tokens: int
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True)
class Holds:
    """What the engines that the worker sees can hold."""

    rows: int
    kv_tokens: int
    kind: Literal["holds"] = "holds"


@dataclass(frozen=True)
class TellAll:
    """An order for every worker, the one that says it too; the answer is ToldAll."""

    ticket: int
    order: _Order
    kind: Literal["tell_all"] = "tell_all"


@dataclass(frozen=True)
class CarriedOut:
    """The answer to CarryOut."""

    ticket: int
    failure: Failure | None = None
    kind: Literal["carried_out"] = "carried_out"


@dataclass(frozen=True)
class Begin:
    """The first message to a worker."""

    number: int
    """Which worker it is, from 1."""
    config: GatewayConfig
    log_settings: Mapping[str, str]
    """How it logs; for who sets the process up."""
    orders: tuple[_Order, ...] = ()
    """What the other workers have been told and still do."""
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True)
class Admitted:
    """The generation may run."""

    seat: int
    waited_s: float
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True)
class Refused:
    """It may not; its seat is gone."""

    seat: int
    failure: Failure
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True)
class CarryOut:
    """An order; the answer is CarriedOut."""

    ticket: int
    order: _Order
    kind: Literal["carry_out"] = "carry_out"


@dataclass(frozen=True)
class ToldAll:
    """The answer to TellAll: how many generations run, or the first failure."""

    ticket: int
    running: int
    failure: Failure | None = None
    kind: Literal["told_all"] = "told_all"


@dataclass(frozen=True)
class End:
    """Drain, then exit."""

    grace_s: float
    kind: Literal["end"] = "end"


FromWorker = Listening | Failed | Enter | Leave | Holds | TellAll | CarriedOut
ToWorker = Begin | Admitted | Refused | CarryOut | ToldAll | End

FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(
    Annotated[FromWorker, Field(discriminator="kind")]
)
TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])
