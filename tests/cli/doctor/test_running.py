"""The doctor in front of a running gateway, each check with something broken."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import model_pb2, model_pb2_grpc
from draftgate.cli.access import reaching
from draftgate.cli.doctor import running
from draftgate.cli.doctor.result import Result, Verdict
from draftgate.cli.doctor.running import look_at
from draftgate.gateway import Gateway
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.fakes.triton import DESCRIPTION, FakeTriton, Script
from tests.support.certificates import Authority
from tests.support.gateway import connected, running_gateway
from tests.support.tenants import TenantsFile

OK = {
    "reachable",
    "encryption",
    "reflection",
    "health",
    "model",
    "clock",
    "replicas",
    "gate",
    "generation",
}


async def look(gateway: Gateway, admin: str = "") -> dict[str, Result]:
    found = await look_at(gateway.address, admin or gateway.address, 5.0)
    return {each.name: each for each in found}


def bad(found: dict[str, Result]) -> dict[str, Verdict]:
    return {name: each.verdict for name, each in found.items() if each.verdict is not Verdict.OK}


@pytest.fixture
async def gateway(triton: FakeTriton) -> AsyncIterator[Gateway]:
    async with running_gateway(triton.target) as found:
        async with connected(found) as client:
            await client.wait_serving()
        yield found


async def test_a_gateway_that_is_well_passes_every_check(gateway: Gateway) -> None:
    found = await look(gateway)
    assert (set(found), bad(found)) == (OK, {})
    assert found["health"].found == "serving, each of 7 services"
    assert found["replicas"].found == "1 of 1 ready"
    assert found["model"].found == "test-model (FP8; drafter ngram)"


async def test_nothing_there_is_said_at_once() -> None:
    [found] = await look_at("127.0.0.1:1", "127.0.0.1:1", 5.0)
    assert (found.name, found.verdict) == ("reachable", Verdict.FAIL)
    assert found.found.startswith("nothing listens on 127.0.0.1:1: ")


async def test_something_else_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        [found] = await look_at(address, address, 0.5)
    assert (found.verdict, found.found) == (
        Verdict.FAIL,
        f"no gRPC server answers on {address}",
    )


async def test_a_gateway_without_a_replica_fails_where_that_hurts(
    triton: FakeTriton, gateway: Gateway
) -> None:
    triton.server_ready = False
    async with connected(gateway) as client:
        await client.wait_serving(False)
    found = await look(gateway)
    assert bad(found) == dict.fromkeys(
        ("health", "model", "replicas", "gate", "generation"), Verdict.FAIL
    )
    assert "GenerationService" in found["health"].found
    assert f"{triton.target}: not ready (the model server is not ready)" in found["replicas"].found


async def test_one_replica_of_two_is_a_warning(triton: FakeTriton) -> None:
    async with running_gateway(f"{triton.target},127.0.0.1:1") as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
        found = await look(gateway)
    assert bad(found) == {"replicas": Verdict.WARN}
    assert found["replicas"].found.startswith("1 of 2 ready; 127.0.0.1:1: not ready")


async def test_an_engine_that_fails_is_found_by_a_token(
    triton: FakeTriton, gateway: Gateway
) -> None:
    triton.default = Script(in_band_error="out of luck")
    found = await look(gateway)
    assert bad(found) == {"generation": Verdict.FAIL}


async def test_a_model_without_a_drafter_is_no_fault(triton: FakeTriton) -> None:
    triton.description = {**DESCRIPTION, "drafter": "", "quantization": ""}
    async with running_gateway(triton.target) as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
        found = await look(gateway)
    assert found["model"].found == "test-model (not quantised; no drafter)"


async def test_replicas_are_told_to_operators_alone(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    monkeypatch.setenv("DRAFTGATE_API_KEY", tenants.add("acme"))
    security = SecurityConfig(tenants_file=tenants.path, open_reflection=False)
    async with running_gateway(triton.target, security=security) as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
        found = await look(gateway)
        assert bad(found) == {"replicas": Verdict.WARN}
        assert "the scope admin" in found["replicas"].remedy
        monkeypatch.delenv("DRAFTGATE_API_KEY")
        assert (await look(gateway))["generation"].found.startswith("UNAUTHENTICATED: ")


async def test_operators_may_be_served_elsewhere(triton: FakeTriton) -> None:
    async with running_gateway(triton.target, admin_listen="127.0.0.1:0") as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
        found = await look(gateway)
        assert bad(found) == {"replicas": Verdict.WARN}
        assert found["replicas"].remedy == "name the listener for operators with --admin"
        assert bad(await look(gateway, gateway.admin_address)) == {}


async def test_tls_is_asked_for_and_its_end_is_told(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    cert, key, ca = (tmp_path / name for name in ("a.crt", "a.key", "ca.crt"))
    authority.issue("server").write(cert, key)
    ca.write_bytes(authority.certificate)
    security = SecurityConfig(tls=TlsConfig(cert, key), reload_interval_s=0.01)
    async with running_gateway(triton.target, security=security) as gateway:
        [found] = await look_at(gateway.address, gateway.address, 2.0)
        assert found.verdict is Verdict.FAIL
        assert found.remedy == (
            "it speaks TLS: name the certificates to trust in DRAFTGATE_CA_FILE"
        )
        monkeypatch.setenv("DRAFTGATE_CA_FILE", str(ca))
        secured = await look(gateway)
        assert secured["encryption"].verdict is Verdict.WARN  # for an hour
        assert secured["encryption"].found.startswith("TLSv1.3, its certificate is valid until")
        authority.issue("server", valid_for=timedelta(days=90)).write(cert, key)
        assert (await look(gateway))["encryption"].verdict is Verdict.OK
        monkeypatch.setenv("DRAFTGATE_CA_FILE", str(_other_ca(tmp_path)))
        _, untrusted = await look_at(gateway.address, gateway.address, 1.0)
        assert (untrusted.name, untrusted.verdict) == ("encryption", Verdict.FAIL)
        assert "certificate verify failed" in untrusted.found


def _other_ca(folder: Path) -> Path:
    path = folder / "other.crt"
    path.write_bytes(Authority("Other CA").certificate)
    return path


class _Elsewhen(model_pb2_grpc.ModelServiceServicer):
    """A server with another clock."""

    def __init__(self, ahead_s: float | None) -> None:
        self.ahead_s = ahead_s

    async def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:  # noqa: N802
        answer = model_pb2.GetModelResponse(model=model_pb2.Model(name="m"))
        if self.ahead_s is not None:
            answer.time.GetCurrentTime()
            answer.time.seconds += int(self.ahead_s)
        return answer


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "words"),
    [
        (0.0, Verdict.OK, "ahead"),
        (10.0, Verdict.WARN, "ahead"),
        (-10.0, Verdict.WARN, "behind"),
        (3600.0, Verdict.FAIL, "ahead"),
        (None, Verdict.WARN, "does not tell"),
    ],
)
async def test_clocks_that_are_apart_are_told(
    ahead_s: float | None, verdict: Verdict, words: str
) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    model_pb2_grpc.add_ModelServiceServicer_to_server(_Elsewhen(ahead_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with reaching(f"127.0.0.1:{port}") as gateway:
            _, clock = await running.check_model(gateway, 5.0)
    finally:
        await server.stop(None)
    assert (clock.name, clock.verdict) == ("clock", verdict)
    assert ahead_s == 0.0 or words in clock.found
