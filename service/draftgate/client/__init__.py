"""The Python client of a Draftgate gateway: `AsyncClient` for asyncio, `Client` for code that
blocks.

    async with AsyncClient("127.0.0.1:50051") as client:
        async with client.generate([Message("user", "Why is the sky blue?")]) as generation:
            async for event in generation:
                ...

Nothing of it is protobuf or gRPC; `draftgate._pb` has the generated code for who wants that.
"""

from __future__ import annotations

from draftgate.client.aio import AsyncGeneration, AsyncStream
from draftgate.client.async_client import AsyncAdmin, AsyncClient, AsyncGate
from draftgate.client.blocking import Generation, Stream
from draftgate.client.blocking_client import Admin, Client, Gate
from draftgate.client.connection import Credentials, Tls
from draftgate.client.errors import CallError, FieldViolation, QuotaViolation
from draftgate.client.operations import (
    GateAcceptance,
    GateCandidate,
    GateCorrection,
    GateCosts,
    GateMode,
    GateOutcome,
    GatePolicy,
    GateReasonCount,
    GateState,
    GateStep,
    GateSteps,
    LogLevel,
    Replica,
    ReplicaState,
)
from draftgate.client.retry import RetryPolicy
from draftgate.client.session import Session, SessionGeneration
from draftgate.client.types import (
    Choice,
    Completion,
    DraftToken,
    Event,
    Finished,
    GenerationDefaults,
    GenerationLimits,
    GenerationOptions,
    Message,
    Model,
    Priority,
    Prompt,
    ServingStatus,
    Speculation,
    Started,
    Token,
    TokenAlternative,
    Tokens,
    Usage,
    VerifyStep,
)
from draftgate.contract import DraftSource, FinishReason, GateReason
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import Verification

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncGate",
    "AsyncGeneration",
    "AsyncStream",
    "CallError",
    "Choice",
    "Client",
    "Completion",
    "Credentials",
    "DraftSource",
    "DraftToken",
    "DraftgateError",
    "ErrorCode",
    "Event",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "Gate",
    "GateAcceptance",
    "GateCandidate",
    "GateCorrection",
    "GateCosts",
    "GateMode",
    "GateOutcome",
    "GatePolicy",
    "GateReason",
    "GateReasonCount",
    "GateState",
    "GateStep",
    "GateSteps",
    "Generation",
    "GenerationDefaults",
    "GenerationLimits",
    "GenerationOptions",
    "LogLevel",
    "Message",
    "Model",
    "Priority",
    "Prompt",
    "QuotaViolation",
    "Replica",
    "ReplicaState",
    "RetryPolicy",
    "ServingStatus",
    "Session",
    "SessionGeneration",
    "Speculation",
    "Started",
    "Stream",
    "Tls",
    "Token",
    "TokenAlternative",
    "Tokens",
    "Usage",
    "Verification",
    "VerifyStep",
]
