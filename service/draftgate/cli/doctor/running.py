"""Checks of a running gateway, through its own API."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftgate._pb.draftgate.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gate_pb2,
    gate_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from draftgate.cli.access import CA_FILE, connect, reaching
from draftgate.cli.doctor.access import expiry
from draftgate.cli.doctor.result import Result, Verdict, fail, ok, warn
from draftgate.cli.gate_words import policy_words, reason_name
from draftgate.client.aio import AsyncTransport
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.listen import is_loopback

__all__ = ["look_at"]

_Answer = TypeVar("_Answer")

_SKEW_WARN_S = 2.0
_SKEW_FAIL_S = 30.0
"""What tokens are given by default for clocks that differ."""
_SLOW_MS = 5000.0
_WHOLE = ""
"""The health service's name for the server as a whole."""


async def look_at(address: str, admin: str, timeout_s: float) -> list[Result]:
    """The gateway at `address`, host:port; `admin` is where its operators are served.

    Raises DraftgateError for an address or an environment that cannot be used.
    """
    async with reaching(address) as gateway, reaching(admin) as operators:
        ca_file = os.environ.get(CA_FILE, "")
        reached = await check_reachable(gateway, address, ca_file, timeout_s)
        if reached.verdict is Verdict.FAIL and not ca_file:
            return [reached]
        encrypted = await check_encryption(address, ca_file, timeout_s)
        if reached.verdict is Verdict.FAIL:
            return [reached, encrypted]
        services, reflected = await check_reflection(gateway, timeout_s)
        return [
            reached,
            encrypted,
            reflected,
            await check_health(gateway, services, timeout_s),
            *await check_model(gateway, timeout_s),
            await check_replicas(operators, timeout_s),
            await check_gate(gateway, timeout_s),
            await check_generation(gateway, timeout_s),
        ]


async def check_reachable(
    gateway: AsyncTransport, address: str, ca_file: str, timeout_s: float
) -> Result:
    began_s = time.perf_counter()
    other = "start one with `draftgate serve`, or name another address"
    try:
        await connect(address, None, timeout_s)
    except (OSError, TimeoutError) as error:
        return fail("reachable", f"nothing listens on {address}: {error or 'no answer'}", other)
    try:
        async with asyncio.timeout(timeout_s):
            await gateway.channel.channel_ready()
    except TimeoutError:
        if not ca_file and await _speaks_tls(address, timeout_s):
            other = f"it speaks TLS: name the certificates to trust in {CA_FILE}"
        return fail("reachable", f"no gRPC server answers on {address}", other)
    return ok("reachable", f"{address}, connected in {_ms_since(began_s):.0f} ms")


async def check_encryption(
    address: str, ca_file: str, timeout_s: float, now: datetime | None = None
) -> Result:
    """Whether what is said can be read on the way, and how long the certificate is valid."""
    if not ca_file:
        if await _on_loopback(address):
            return ok("encryption", "none: clear text on loopback")
        return warn("encryption", "none: clear text", "set up security.tls in the settings")
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["h2"])
    try:
        tls = await connect(address, context, timeout_s)
    except (OSError, TimeoutError) as error:
        return fail("encryption", f"no TLS with {address}: {error or 'it takes too long'}")
    certificate = tls.getpeercert()
    assert certificate is not None  # Else it would not have been trusted.
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    not_after = datetime.fromtimestamp(ends, UTC)
    return expiry(
        "encryption", f"{tls.version()}, its certificate", not_after, now or datetime.now(UTC)
    )


async def check_reflection(
    gateway: AsyncTransport, timeout_s: float
) -> tuple[Sequence[str], Result]:
    """The services that the server lists, and whether it does."""
    call = reflection_pb2_grpc.ServerReflectionStub(gateway.channel).ServerReflectionInfo(
        **_call(gateway, timeout_s)
    )
    try:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    except grpc.aio.AioRpcError as error:
        shown = f"off or closed: {error.details()}"
        return (), warn("reflection", shown, "open it, or give tools the .proto files")
    services = [each.name for each in answer.list_services_response.service]
    return services, ok("reflection", f"{len(services)} services are listed")


async def check_health(
    gateway: AsyncTransport, services: Sequence[str], timeout_s: float
) -> Result:
    stub = health_pb2_grpc.HealthStub(gateway.channel)
    serving, others = [], []
    for service in (_WHOLE, *services):
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            status = (await stub.Check(request, **_call(gateway, timeout_s))).status
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                continue  # Health and reflection say nothing of themselves.
            return fail("health", f"{service or 'the server'}: {error.details()}")
        if status == health_pb2.HealthCheckResponse.SERVING:
            serving.append(service)
        else:
            others.append(service.rpartition(".")[2] or "the server as a whole")
    if others:
        return fail("health", f"not serving: {', '.join(others)}", "see what `replicas` says")
    return ok("health", f"serving, each of {len(serving) - 1} services")


async def check_model(gateway: AsyncTransport, timeout_s: float) -> list[Result]:
    """What is served, and how far the clocks are apart."""
    stub = model_pb2_grpc.ModelServiceStub(gateway.channel)
    asked_s = time.time()
    try:
        answer = await _told(
            stub.GetModel(
                model_pb2.GetModelRequest(),
                timeout=timeout_s,
                metadata=gateway.connection.metadata(),
            )
        )
    except DraftgateError as error:
        return [fail("model", error.message)]
    model = answer.model
    drafter = f"drafter {model.drafter}" if model.drafter else "no drafter"
    shown = f"{model.name} ({model.quantization or 'not quantised'}; {drafter})"
    return [ok("model", shown), _clock(answer, asked_s, time.time())]


async def check_replicas(gateway: AsyncTransport, timeout_s: float) -> Result:
    stub = admin_pb2_grpc.AdminServiceStub(gateway.channel)
    request = admin_pb2.ListReplicasRequest()
    try:
        replicas = (await _told(stub.ListReplicas(request, **_call(gateway, timeout_s)))).replicas
    except DraftgateError as error:
        if error.code is ErrorCode.UNIMPLEMENTED:
            remedy = "name the listener for operators with --admin"
        else:
            remedy = "give an API key with the scope admin in DRAFTGATE_API_KEY"
        return warn("replicas", f"not told: {error.message}", remedy)
    good = (admin_pb2.REPLICA_STATE_READY, admin_pb2.REPLICA_STATE_PROBATION)
    bad = [each for each in replicas if each.state not in good]
    shown = f"{len(replicas) - len(bad)} of {len(replicas)} ready"
    if not bad:
        return ok("replicas", shown)
    shown += "".join(f"; {each.address}: {_replica_words(each)}" for each in bad)
    if len(bad) == len(replicas):
        return fail("replicas", shown, "see the log of these model servers")
    return warn("replicas", shown, "see the log of these model servers")


async def check_gate(gateway: AsyncTransport, timeout_s: float) -> Result:
    stub = gate_pb2_grpc.GateServiceStub(gateway.channel)
    try:
        answer = await _told(
            stub.GetState(
                gate_pb2.GetStateRequest(),
                timeout=timeout_s,
                metadata=gateway.connection.metadata(),
            )
        )
    except DraftgateError as error:
        if error.code is ErrorCode.UNIMPLEMENTED:
            return ok("gate", error.message)
        return fail("gate", error.message)
    state = answer.state
    shown = f"{policy_words(state.policy)}; drafts {state.draft_len}, {reason_name(state.reason)}"
    return ok("gate", f"{shown}; {state.running_rows} rows run, {state.waiting_rows} wait")


async def check_generation(gateway: AsyncTransport, timeout_s: float) -> Result:
    """How long one token takes, all the way through."""
    request = generation_pb2.GenerateRequest(prompt="Hello", max_tokens=1)
    request.sampling.temperature = 0.0
    began_s = time.perf_counter()
    call = generation_pb2_grpc.GenerationServiceStub(gateway.channel).Generate(
        request, **_call(gateway, timeout_s)
    )
    tokens = 0
    try:
        async for event in call:
            tokens += len(event.tokens.tokens) if event.HasField("tokens") else 0
    except grpc.aio.AioRpcError as error:
        return fail("generation", f"{error.code().name}: {error.details()}")
    took_ms = _ms_since(began_s)
    shown = f"one token in {took_ms:.0f} ms" if tokens else f"ended without one in {took_ms:.0f} ms"
    if took_ms > _SLOW_MS:
        return warn("generation", shown, "see what runs: draftgate top")
    return ok("generation", shown)


def _clock(answer: model_pb2.GetModelResponse, asked_s: float, told_s: float) -> Result:
    if not answer.HasField("time"):
        return warn("clock", "the server does not tell its own", "update it")
    skew_s = answer.time.ToNanoseconds() / 1e9 - (asked_s + told_s) / 2
    # It answered at some moment between the two.
    apart_s = max(0.0, abs(skew_s) - (told_s - asked_s) / 2)
    shown = f"the server's is {apart_s:.1f} s {'ahead' if skew_s > 0 else 'behind'}"
    remedy = "keep both by NTP: tokens, API keys and certificates expire by them"
    if apart_s > _SKEW_FAIL_S:
        return fail("clock", shown, remedy)
    return warn("clock", shown, remedy) if apart_s > _SKEW_WARN_S else ok("clock", shown)


def _replica_words(replica: admin_pb2.Replica) -> str:
    state = admin_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
    return f"{state.replace('_', ' ')}{f' ({replica.reason})' if replica.reason else ''}"


async def _told(call: Awaitable[_Answer]) -> _Answer:
    """Raises DraftgateError with the status of the call."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        code = ErrorCode.__members__.get(error.code().name, ErrorCode.INTERNAL)
        raise DraftgateError(code, error.details() or error.code().name) from error


async def _speaks_tls(address: str, timeout_s: float) -> bool:
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        await connect(address, anyone, timeout_s)
    except (OSError, TimeoutError):
        return False
    return True


async def _on_loopback(address: str) -> bool:
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port))
    return all(is_loopback(each[4][0]) for each in found)


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1e3


def _call(gateway: AsyncTransport, timeout_s: float) -> dict[str, Any]:
    """How a call is made: for so long at most, with what the environment says about access."""
    return {"timeout": timeout_s, "metadata": gateway.connection.metadata()}
