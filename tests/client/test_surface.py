"""The client offers all of the API, and what it offers is pinned."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from draftgate import client as package
from draftgate._pb.draftgate.v1 import (
    admin_pb2,
    gate_pb2,
    generation_pb2,
    model_pb2,
    session_pb2,
    tokenizer_pb2,
)
from draftgate.client import (
    Admin,
    AsyncAdmin,
    AsyncClient,
    AsyncGate,
    AsyncGeneration,
    AsyncStream,
    Client,
    Gate,
    GatePolicy,
    Generation,
    LogLevel,
    Stream,
)
from tests.fakes.wire import FakeWire
from tests.support.clients import Opened, opened

FILES = (admin_pb2, gate_pb2, generation_pb2, model_pb2, session_pb2, tokenizer_pb2)


async def _run_session(client: AsyncClient) -> None:
    async with client.session() as session:
        session.generate("Hi")
        # It is sent by a task of its own.
        await asyncio.sleep(0.1)


RPCS: Mapping[str, Callable[[Any], Awaitable[object]]] = {
    "AdminService/ListReplicas": lambda client: client.admin.replicas(),
    "AdminService/DrainReplica": lambda client: client.admin.drain_replica("a:1"),
    "AdminService/UndrainReplica": lambda client: client.admin.undrain_replica("a:1"),
    "AdminService/Drain": lambda client: client.admin.drain(),
    "AdminService/SetLogLevel": lambda client: client.admin.set_log_level(LogLevel.INFO),
    "GateService/GetState": lambda client: client.gate.state(),
    "GateService/WatchState": lambda client: anext(client.gate.watch()),
    "GateService/SetPolicy": lambda client: client.gate.set_policy(GatePolicy()),
    "GateService/WatchSteps": lambda client: anext(client.gate.watch_steps()),
    "GenerationService/Generate": lambda client: client.generate("Hi").text(),
    "GenerationService/GenerateOnce": lambda client: client.generate_once("Hi"),
    "ModelService/GetModel": lambda client: client.model(),
    "SessionService/Session": _run_session,
    "TokenizerService/Tokenize": lambda client: client.tokenize("Hi"),
    "TokenizerService/Detokenize": lambda client: client.detokenize([1]),
}
"""How each RPC is called through the client."""


def test_every_rpc_is_offered() -> None:
    rpcs = {
        f"{service.name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(RPCS) == rpcs


@pytest.mark.parametrize("rpc", RPCS)
async def test_each_calls_what_it_says(
    wire: FakeWire, scripted: Opened, kind: str, rpc: str
) -> None:
    if rpc.startswith("SessionService") and kind == "blocking":
        return  # Sessions are asynchronous.
    await RPCS[rpc](scripted)
    assert wire.methods == [f"draftgate.v1.{rpc}"]


async def test_health_is_offered_too(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address) as client:
        await client.health()
        await anext(client.watch_health())
    assert wire.methods == ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"]


@pytest.mark.parametrize(
    ("kind", "message", "left_out"),
    [
        (package.Started, generation_pb2.GenerationStarted, set()),
        (package.Tokens, generation_pb2.TokenChunk, set()),
        (package.Token, generation_pb2.Token, {"source"}),
        (package.TokenAlternative, generation_pb2.TokenAlternative, set()),
        (package.VerifyStep, generation_pb2.VerifyStep, {"draft_source"}),
        (package.DraftToken, generation_pb2.DraftToken, set()),
        (
            package.Finished,
            generation_pb2.GenerationFinished,
            {"stop_string", "stop_token_id", "eos_token_id"},
        ),
        (package.Usage, generation_pb2.Usage, set()),
        (package.Speculation, generation_pb2.Speculation, set()),
        (package.Choice, generation_pb2.Choice, set()),
        (package.Completion, generation_pb2.GenerateOnceResponse, set()),
        (package.Message, generation_pb2.ChatMessage, set()),
        (package.Model, model_pb2.Model, set()),
        (package.GenerationDefaults, model_pb2.GenerationDefaults, set()),
        (package.GenerationLimits, model_pb2.GenerationLimits, set()),
        (package.GatePolicy, gate_pb2.GatePolicy, set()),
        (package.GateState, gate_pb2.GateState, set()),
        (package.GateStep, gate_pb2.GateStep, set()),
        (package.GateOutcome, gate_pb2.GateOutcome, set()),
        (package.GateSteps, gate_pb2.WatchStepsResponse, set()),
        (package.GateCandidate, gate_pb2.GateCandidate, set()),
        (package.GateAcceptance, gate_pb2.GateAcceptance, set()),
        (package.GateReasonCount, gate_pb2.GateReasonCount, set()),
        (package.GateCosts, gate_pb2.GateCosts, set()),
        (package.GateCorrection, gate_pb2.GateCorrection, set()),
        (package.Replica, admin_pb2.Replica, set()),
    ],
)
def test_every_field_of_an_answer_is_there(kind: Any, message: Any, left_out: set[str]) -> None:
    descriptor: Descriptor = message.DESCRIPTOR
    names = {field.name for field in dataclasses.fields(kind)}
    assert set(descriptor.fields_by_name) - names == left_out


def test_every_field_of_a_generation_can_be_asked_for() -> None:
    asked = {
        *generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name,
        *generation_pb2.SamplingParameters.DESCRIPTOR.fields_by_name,
    } - {"prompt", "messages", "input_ids", "sampling"}
    assert set(package.GenerationOptions.__annotations__) == asked


@pytest.mark.parametrize(
    ("blocking", "asynchronous", "only_asynchronous"),
    [
        (Client, AsyncClient, {"session"}),
        (Gate, AsyncGate, set()),
        (Admin, AsyncAdmin, set()),
        (Generation, AsyncGeneration, set()),
        (Stream, AsyncStream, set()),
    ],
)
def test_both_clients_offer_the_same(
    blocking: type, asynchronous: type, only_asynchronous: set[str]
) -> None:
    ours, theirs = _methods(blocking), _methods(asynchronous)
    assert theirs.keys() - ours.keys() == only_asynchronous
    assert {name: theirs[name] for name in ours} == ours


def _methods(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    """The public methods with their parameters."""
    return {
        name: [
            (each.name, each.default, each.annotation)
            for each in inspect.signature(method).parameters.values()
        ]
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_what_is_exported_is_pinned() -> None:
    assert set(package.__all__) == EXPORTS
    for name in package.__all__:
        assert getattr(package, name) is not None


EXPORTS = set(
    """
    GenerationDefaults GenerationLimits
    Admin AsyncAdmin AsyncClient AsyncGate AsyncGeneration AsyncStream CallError Choice Client
    Completion Credentials DraftSource DraftToken DraftgateError ErrorCode Event FieldViolation
    FinishReason Finished Gate GateAcceptance GateCandidate GateCorrection GateCosts GateMode
    GateOutcome GatePolicy GateReason GateReasonCount GateState GateStep GateSteps Generation
    GenerationOptions LogLevel Message Model Priority Prompt QuotaViolation Replica ReplicaState
    RetryPolicy ServingStatus Session SessionGeneration Speculation Started Stream Tls Token
    TokenAlternative Tokens Usage Verification VerifyStep
    """.split()  # noqa: SIM905  # a list of literals takes a line for each
)
"""Taking one away breaks somebody's program."""
