"""Every question that can be asked of a gateway: which RPC, with what, and how its answer is read.

Both clients ask these; they differ in how they wait alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftgate._pb.draftgate.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gate_pb2,
    gate_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from draftgate.client import convert, requests
from draftgate.client.operations import GatePolicy, GateState, GateSteps, LogLevel, Replica
from draftgate.client.types import (
    Completion,
    Event,
    GenerationOptions,
    Message,
    Model,
    Prompt,
    ServingStatus,
)

__all__ = [
    "Ask",
    "Stubs",
    "detokenize",
    "drain",
    "drain_replica",
    "gate_state",
    "generate",
    "generate_once",
    "health",
    "list_replicas",
    "model",
    "set_gate_policy",
    "set_log_level",
    "tokenize",
    "undrain_replica",
    "watch_gate",
    "watch_health",
    "watch_steps",
]

T = TypeVar("T")


class Stubs:
    """The generated stubs on one channel, of either kind."""

    def __init__(self, channel: Any) -> None:
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        self.tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self.gate: Any = gate_pb2_grpc.GateServiceStub(channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


@dataclass(frozen=True)
class Ask(Generic[T]):
    """One question."""

    rpc: Callable[[Stubs], Any]
    """The stub's method."""
    request: ProtoMessage
    read: Callable[[Any], T]
    """What a response says."""


def generate(prompt: Prompt, options: GenerationOptions) -> Ask[Event | None]:
    request = requests.generate_request(prompt, options)
    return Ask(lambda stubs: stubs.generation.Generate, request, convert.event)


def generate_once(
    prompt: Prompt, options: GenerationOptions, *, return_tokens: bool
) -> Ask[Completion]:
    request = requests.made(
        generation_pb2.GenerateOnceRequest(generation=requests.generate_request(prompt, options)),
        return_tokens=return_tokens,
    )
    return Ask(lambda stubs: stubs.generation.GenerateOnce, request, convert.completion)


def tokenize(prompt: str | Sequence[Message], model: str) -> Ask[tuple[int, ...]]:
    request = requests.made(tokenizer_pb2.TokenizeRequest(), model=model)
    if isinstance(prompt, str):
        requests.made(request, prompt=prompt)
    else:
        request.messages.extend(requests.chat_messages(prompt))
    return Ask(lambda stubs: stubs.tokenizer.Tokenize, request, lambda found: tuple(found.ids))


def detokenize(ids: Sequence[int], model: str) -> Ask[str]:
    request = requests.made(tokenizer_pb2.DetokenizeRequest(), ids=ids, model=model)
    return Ask(lambda stubs: stubs.tokenizer.Detokenize, request, lambda found: str(found.text))


def model(name: str) -> Ask[Model]:
    request = requests.made(model_pb2.GetModelRequest(), name=name)
    return Ask(
        lambda stubs: stubs.models.GetModel, request, lambda found: convert.model(found.model)
    )


def gate_state(replica: str) -> Ask[GateState]:
    request = requests.made(gate_pb2.GetStateRequest(), replica=replica)
    return Ask(lambda stubs: stubs.gate.GetState, request, _gate_state)


def watch_gate(interval_ms: int | None, replica: str) -> Ask[GateState]:
    request = requests.made(gate_pb2.WatchStateRequest(), interval_ms=interval_ms, replica=replica)
    return Ask(lambda stubs: stubs.gate.WatchState, request, _gate_state)


def set_gate_policy(policy: GatePolicy, *, save: bool, replica: str) -> Ask[GateState]:
    request = requests.made(
        gate_pb2.SetPolicyRequest(policy=requests.gate_policy(policy)), save=save, replica=replica
    )
    return Ask(lambda stubs: stubs.gate.SetPolicy, request, _gate_state)


def watch_steps(interval_ms: int | None, after_step: int | None, replica: str) -> Ask[GateSteps]:
    request = requests.made(
        gate_pb2.WatchStepsRequest(),
        interval_ms=interval_ms,
        after_step=after_step,
        replica=replica,
    )
    return Ask(lambda stubs: stubs.gate.WatchSteps, request, convert.gate_steps)


def list_replicas() -> Ask[tuple[Replica, ...]]:
    return Ask(
        lambda stubs: stubs.admin.ListReplicas,
        admin_pb2.ListReplicasRequest(),
        lambda found: tuple(map(convert.replica, found.replicas)),
    )


def drain_replica(address: str, *, move: bool) -> Ask[Replica]:
    request = requests.made(admin_pb2.DrainReplicaRequest(), address=address, move=move)
    return Ask(lambda stubs: stubs.admin.DrainReplica, request, _replica)


def undrain_replica(address: str) -> Ask[Replica]:
    request = requests.made(admin_pb2.UndrainReplicaRequest(), address=address)
    return Ask(lambda stubs: stubs.admin.UndrainReplica, request, _replica)


def drain() -> Ask[int]:
    return Ask(
        lambda stubs: stubs.admin.Drain,
        admin_pb2.DrainRequest(),
        lambda found: int(found.generations),
    )


def set_log_level(level: LogLevel) -> Ask[LogLevel]:
    request = admin_pb2.SetLogLevelRequest(level=requests.log_level(level))
    return Ask(
        lambda stubs: stubs.admin.SetLogLevel,
        request,
        lambda found: convert.log_level(found.previous),
    )


def health(service: str) -> Ask[ServingStatus]:
    request = requests.made(health_pb2.HealthCheckRequest(), service=service)
    return Ask(lambda stubs: stubs.health.Check, request, _serving)


def watch_health(service: str) -> Ask[ServingStatus]:
    request = requests.made(health_pb2.HealthCheckRequest(), service=service)
    return Ask(lambda stubs: stubs.health.Watch, request, _serving)


def _gate_state(response: Any) -> GateState:
    return convert.gate_state(response.state)


def _replica(response: Any) -> Replica:
    return convert.replica(response.replica)


def _serving(response: Any) -> ServingStatus:
    return convert.serving_status(response.status)
