"""TLS and mutual TLS, with certificates that change."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftgate.errors import DraftgateError
from draftgate.gateway import Gateway, GatewayConfig
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.fakes.triton import FakeTriton
from tests.support.certificates import Authority, Issued
from tests.support.gateway import MODEL, running_gateway


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> TlsConfig:
    config = TlsConfig(tmp_path / "server.crt", tmp_path / "server.key")
    authority.issue("server").write(config.cert_file, config.key_file)
    return config


@asynccontextmanager
async def secured(triton: FakeTriton, tls: TlsConfig) -> AsyncIterator[Gateway]:
    async with running_gateway(triton.target, security=SecurityConfig(tls=tls)) as gateway:
        yield gateway


async def works(gateway: Gateway, roots: bytes, client: Issued | None = None) -> bool:
    """Whether a new connection comes about."""
    credentials = grpc.ssl_channel_credentials(
        roots, client and client.key, client and client.certificate
    )
    own = [("grpc.use_local_subchannel_pool", 1)]
    target = f"127.0.0.1:{gateway.port}"
    async with grpc.aio.secure_channel(target, credentials, options=own) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            code = error.code()
        else:
            return True
    assert code is grpc.StatusCode.UNAVAILABLE
    return False


async def test_clients_who_trust_the_authority_connect(
    triton: FakeTriton, tls: TlsConfig, authority: Authority
) -> None:
    async with secured(triton, tls) as gateway:
        assert await works(gateway, authority.certificate)
        assert not await works(gateway, Authority().certificate)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=10
                )


async def test_a_client_may_have_to_show_a_certificate_too(
    triton: FakeTriton, tls: TlsConfig, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority("clients")
    ca_file = tmp_path / "clients.crt"
    ca_file.write_bytes(clients.certificate)
    mutual = TlsConfig(tls.cert_file, tls.key_file, ca_file)
    async with secured(triton, mutual) as gateway:
        assert await works(gateway, authority.certificate, clients.issue("client"))
        assert not await works(gateway, authority.certificate)
        assert not await works(gateway, authority.certificate, authority.issue("client"))
        # Whom it trusts may change as well.
        ca_file.write_bytes(authority.certificate)
        assert await works(gateway, authority.certificate, authority.issue("client"))
        assert not await works(gateway, authority.certificate, clients.issue("client"))


async def test_a_new_certificate_is_taken_up_without_a_restart(
    triton: FakeTriton, tls: TlsConfig, authority: Authority
) -> None:
    async with secured(triton, tls) as gateway:
        assert await works(gateway, authority.certificate)
        new = Authority("new")
        new.issue("server").write(tls.cert_file, tls.key_file)
        assert await works(gateway, new.certificate)
        assert not await works(gateway, authority.certificate)


async def test_a_damaged_certificate_changes_nothing(
    triton: FakeTriton, tls: TlsConfig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(triton, tls) as gateway:
        tls.key_file.write_bytes(authority.issue("another").key)
        with pytest.raises(DraftgateError, match=r"key_file: .* is not the private key of "):
            gateway.reload()
        for _ in range(3):
            assert await works(gateway, authority.certificate)
        errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert "the certificate stays as it was: key_file: " in errors[0].getMessage()
        assert "PRIVATE KEY" not in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tls: tls.cert_file.unlink(), "cert_file: .*: No such file or directory"),
        (lambda tls: tls.key_file.unlink(), "key_file: .*: No such file or directory"),
        (lambda tls: tls.cert_file.write_text("nonsense"), "cert_file: .* is not in PEM"),
        (lambda tls: tls.key_file.write_text("nonsense"), "cert_file: .* is not in PEM"),
        (
            lambda tls: tls.key_file.write_bytes(Authority().issue("x").key),
            "key_file: .*: it is not the private key of ",
        ),
    ],
)
async def test_a_certificate_of_no_use_is_one_clear_error(
    triton: FakeTriton, tls: TlsConfig, damage: object, message: str
) -> None:
    damage(tls)  # type: ignore[operator]
    config = GatewayConfig(triton.target, MODEL, "127.0.0.1:0", security=SecurityConfig(tls=tls))
    with pytest.raises(DraftgateError, match=message):
        await Gateway(config).start()


async def test_an_authority_that_is_none_is_one_clear_error(
    triton: FakeTriton, tls: TlsConfig, tmp_path: Path
) -> None:
    ca_file = tmp_path / "clients.crt"
    ca_file.write_text("nonsense")
    mutual = TlsConfig(tls.cert_file, tls.key_file, ca_file)
    config = GatewayConfig(triton.target, MODEL, "127.0.0.1:0", security=SecurityConfig(tls=mutual))
    with pytest.raises(DraftgateError, match=r"client_ca_file: .*: no certificate"):
        await Gateway(config).start()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0"])
async def test_other_machines_are_not_served_in_clear_text(triton: FakeTriton, listen: str) -> None:
    with pytest.raises(DraftgateError) as caught:
        await Gateway(GatewayConfig(triton.target, MODEL, listen)).start()
    assert caught.value.message == (
        f"cannot listen on {listen}: other machines could reach it in clear text; set up TLS "
        "(security.tls in the configuration), or allow it with --insecure"
    )


async def test_they_are_with_tls_or_when_it_is_allowed(
    triton: FakeTriton, tls: TlsConfig, authority: Authority
) -> None:
    for security in (SecurityConfig(tls=tls), SecurityConfig(insecure=True)):
        async with running_gateway(triton.target, listen="0.0.0.0:0", security=security) as gateway:
            assert gateway.port
            assert not security.tls or await works(gateway, authority.certificate)
