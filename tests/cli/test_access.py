"""What the environment says about access reaches the server, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.fakes.triton import FakeTriton
from tests.support.certificates import Authority
from tests.support.gateway import running_gateway
from tests.support.tenants import TenantsFile
from tests.support.terminal import run_in_pipe


async def test_a_key_and_an_authority(triton: FakeTriton, tmp_path: Path) -> None:
    authority = Authority()
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(authority.certificate)
    tls = TlsConfig(tmp_path / "server.crt", tmp_path / "server.key")
    authority.issue("server").write(tls.cert_file, tls.key_file)
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme")
    security = SecurityConfig(tls=tls, tenants_file=tenants.path)
    async with running_gateway(triton.target, security=security) as gateway:
        await gateway.local.serving(timeout_s=30)
        ask = ["generate", "Hi", "--server", f"127.0.0.1:{gateway.port}"]
        trusting = {"DRAFTGATE_CA_FILE": str(ca_file)}
        done = await run_in_pipe(ask, env={**trusting, "DRAFTGATE_API_KEY": key})
        assert (done.code, done.out) == (0, "Hello world\n")
        done = await run_in_pipe(ask, env=trusting)
        assert done.code == 1
        assert done.err.startswith("error: no credentials: ")


async def test_a_certificate_of_ones_own(triton: FakeTriton, tmp_path: Path) -> None:
    authority = Authority()
    ca_file, cert_file, key_file = (tmp_path / name for name in ("ca.crt", "me.crt", "me.key"))
    ca_file.write_bytes(authority.certificate)
    tls = TlsConfig(tmp_path / "server.crt", tmp_path / "server.key", client_ca_file=ca_file)
    authority.issue("server").write(tls.cert_file, tls.key_file)
    authority.issue("me").write(cert_file, key_file)
    trusting = {"DRAFTGATE_CA_FILE": str(ca_file)}
    shown = {"DRAFTGATE_CERT_FILE": str(cert_file), "DRAFTGATE_KEY_FILE": str(key_file)}
    async with running_gateway(triton.target, security=SecurityConfig(tls=tls)) as gateway:
        await gateway.local.serving(timeout_s=30)
        address = f"127.0.0.1:{gateway.port}"
        ask = ["generate", "Hi", "--server", address]
        done = await run_in_pipe(ask, env={**trusting, **shown})
        assert (done.code, done.out) == (0, "Hello world\n")
        # There is a server: to start one is no advice.
        done = await run_in_pipe(ask, env=trusting)
        assert (done.code, done.out) == (1, "")
        assert f"the server at {address} broke off, or does not answer over TLS" in done.err
        assert "DRAFTGATE_CERT_FILE" in done.err
        done = await run_in_pipe(ask)
        assert (done.code, done.out) == (1, "")
        assert f"the server at {address} broke off, or does not answer in clear text" in done.err
        assert "DRAFTGATE_CA_FILE" in done.err


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        (
            "DRAFTGATE_CA_FILE",
            "/nowhere/ca.crt",
            "DRAFTGATE_CA_FILE: /nowhere/ca.crt cannot be read: No such file or directory",
        ),
        (
            "DRAFTGATE_CERT_FILE",
            "/nowhere/me.crt",
            "DRAFTGATE_KEY_FILE: got None, allowed: a file, with the other one",
        ),
        *(
            (
                "DRAFTGATE_API_KEY",
                key,
                "DRAFTGATE_API_KEY: got characters that no header can hold, allowed: printable "
                "ASCII",
            )
            for key in ("schl\u00fcssel", "two\nlines")
        ),
    ],
)
async def test_a_variable_that_is_of_no_use_is_named(
    variable: str, value: str, problem: str
) -> None:
    ask = ["generate", "Hi", "--server", "127.0.0.1:1"]
    done = await run_in_pipe(ask, env={variable: value})
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: {problem}\n"
