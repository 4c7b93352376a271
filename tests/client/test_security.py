"""Credentials and certificates, and that nobody sees them by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftgate.client import AsyncClient, CallError, Client, DraftgateError, ErrorCode, Tls
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.fakes.triton import FakeTriton
from tests.fakes.wire import FakeWire
from tests.support.certificates import Authority
from tests.support.clients import opened
from tests.support.gateway import running_gateway
from tests.support.tenants import TenantsFile


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(tmp_path: Path, authority: Authority) -> TlsConfig:
    config = TlsConfig(tmp_path / "server.crt", tmp_path / "server.key")
    authority.issue("server").write(config.cert_file, config.key_file)
    return config


@pytest.fixture
def ca_file(tmp_path: Path, authority: Authority) -> Path:
    file = tmp_path / "ca.crt"
    file.write_bytes(authority.certificate)
    return file


async def test_a_key_over_tls(
    triton: FakeTriton, tls: TlsConfig, ca_file: Path, tmp_path: Path, kind: str
) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme")
    security = SecurityConfig(tls=tls, tenants_file=tenants.path)
    async with running_gateway(triton.target, security=security) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        async with opened(kind, address, credentials=key, tls=Tls(ca_file)) as client:
            await client.wait_serving(timeout_s=30)
            assert await client.generate("Hi").text() == "Hello world"
            assert (await client.generate_once("Hi")).text == "Hello world"
            with pytest.raises(CallError) as caught:
                await client.admin.replicas()
            assert caught.value.code is ErrorCode.PERMISSION_DENIED
        for credentials in (None, "nonsense"):
            async with opened(kind, address, credentials=credentials, tls=Tls(ca_file)) as client:
                with pytest.raises(CallError) as caught:
                    await client.generate("Hi").text()
                assert caught.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_server_of_another_authority_gets_nothing(
    triton: FakeTriton, tls: TlsConfig, tmp_path: Path, kind: str
) -> None:
    other = tmp_path / "other.crt"
    other.write_bytes(Authority().certificate)
    async with running_gateway(triton.target, security=SecurityConfig(tls=tls)) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        async with opened(kind, address, credentials="key", tls=Tls(other)) as client:
            with pytest.raises(CallError) as caught:
                await client.model()
            assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_certificate_of_its_own(
    triton: FakeTriton, tls: TlsConfig, ca_file: Path, tmp_path: Path, kind: str
) -> None:
    clients = Authority("clients")
    trusted, cert, key = (tmp_path / name for name in ("clients.crt", "me.crt", "me.key"))
    trusted.write_bytes(clients.certificate)
    clients.issue("me").write(cert, key)
    mutual = TlsConfig(tls.cert_file, tls.key_file, trusted)
    async with running_gateway(triton.target, security=SecurityConfig(tls=mutual)) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        shown = Tls(ca_file, cert, str(key), server_name="127.0.0.1")
        async with opened(kind, address, tls=shown) as client:
            await client.wait_serving(timeout_s=30)
        async with opened(kind, address, tls=Tls(ca_file)) as client:
            with pytest.raises(CallError):
                await client.model()


async def test_credentials_may_change(wire: FakeWire, kind: str) -> None:
    tokens = iter(["first", "second"])
    async with opened(kind, wire.address, credentials=lambda: next(tokens)) as client:
        await client.generate("Hi").text()
        await client.model()
    shown = [call.metadata["authorization"] for call in wire.calls]
    assert shown == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    "address", ["10.0.0.1:50051", "gateway:50051", "[2001:db8::1]:50051", "dns:///gateway:50051"]
)
@pytest.mark.parametrize("made", [AsyncClient, Client])
async def test_credentials_do_not_leave_the_machine_in_clear_text(
    address: str, made: type[AsyncClient] | type[Client]
) -> None:
    with pytest.raises(DraftgateError) as caught:
        made(address, credentials="s3cret")
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert caught.value.message == (
        f"others could read the credentials on their way to {address}, in clear text: set up TLS "
        "with tls=Tls(...), or allow it with insecure=True"
    )


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1", "localhost:1", "unix:/run/draftgate"]
)
def test_they_may_on_the_machine_over_tls_or_when_it_is_allowed(address: str) -> None:
    Client(address, credentials="s3cret").close()
    Client("10.0.0.1:1", credentials="s3cret", tls=Tls()).close()
    Client("10.0.0.1:1", credentials="s3cret", insecure=True).close()
    Client("10.0.0.1:1").close()


def test_files_that_are_of_no_use_are_named(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError) as caught:
        Client("127.0.0.1:1", tls=Tls(tmp_path / "none"))
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert caught.value.message == (
        f"tls.ca_file: {tmp_path}/none cannot be read: No such file or directory"
    )
    with pytest.raises(DraftgateError, match=r"tls\.key_file: got None"):
        Tls(cert_file=tmp_path / "me.crt")
    with pytest.raises(DraftgateError, match=r"tls\.cert_file: got None"):
        Tls(key_file=tmp_path / "me.key")


async def test_credentials_that_no_header_can_hold_are_the_callers_fault(
    wire: FakeWire, kind: str
) -> None:
    with pytest.raises(DraftgateError, match="credentials: got characters that no header"):
        Client(wire.address, credentials="schl\u00fcssel")
    async with opened(kind, wire.address, credentials=lambda: "two\nlines") as client:
        with pytest.raises(DraftgateError, match="credentials: got characters that no header"):
            await client.model()
