"""The doctor's checks of settings, listeners and files of access, each with something broken."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from draftgate.cli.doctor.access import (
    check_certificates,
    check_listener,
    check_settings,
    check_tenants,
)
from draftgate.cli.doctor.result import Verdict
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.support.certificates import Authority
from tests.support.tenants import TenantsFile

LATER = datetime.now(UTC) + timedelta(days=400)


def test_settings_are_read_or_what_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("grace_s: 3")
    settings, found = check_settings(file)
    assert settings is not None
    assert (found.verdict, found.found) == (Verdict.OK, f"{file}: 1 are not the default")
    file.write_text("grace: 3")
    settings, found = check_settings(file)
    assert (settings, found.verdict) == (None, Verdict.FAIL)
    assert found.found.startswith("grace: Extra inputs are not permitted")


def test_a_free_address_is_right() -> None:
    assert check_listener("listen", "127.0.0.1:0", SecurityConfig()).verdict is Verdict.OK


def test_a_port_that_another_program_has_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        found = check_listener("listen", listen, SecurityConfig())
    assert (found.verdict, "is in use" in found.found) == (Verdict.FAIL, True)


def test_clear_text_beyond_loopback_fails() -> None:
    found = check_listener("listen", "0.0.0.0:0", SecurityConfig())
    assert found.verdict is Verdict.FAIL
    assert "allow it with --insecure" in found.found
    assert check_listener("listen", "0.0.0.0:0", SecurityConfig(insecure=True)).verdict == "ok"


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    config = TlsConfig(tmp_path / "a.crt", tmp_path / "a.key")
    Authority().issue("server", valid_for=timedelta(days=90)).write(
        config.cert_file, config.key_file
    )
    config.key_file.chmod(0o600)
    return config


def test_certificates_that_last_are_right(tls: TlsConfig) -> None:
    assert check_certificates(tls).verdict is Verdict.OK
    assert check_certificates(None).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("days", "verdict"), [(-1, Verdict.FAIL), (80, Verdict.WARN), (91, Verdict.FAIL)]
)
def test_certificates_are_not_yet_soon_no_more_or_no_longer_valid(
    tls: TlsConfig, days: int, verdict: Verdict
) -> None:
    found = check_certificates(tls, datetime.now(UTC) + timedelta(days=days))
    assert found.verdict is verdict


def test_a_key_of_another_certificate_fails(tls: TlsConfig) -> None:
    tls.key_file.write_bytes(Authority().issue("other").key)
    found = check_certificates(tls)
    assert (found.verdict, "it is not the private key" in found.found) == (Verdict.FAIL, True)


def test_a_private_key_that_others_may_read_is_warned_of(tls: TlsConfig) -> None:
    tls.key_file.chmod(0o644)
    found = check_certificates(tls)
    assert (found.verdict, found.remedy) == (Verdict.WARN, f"chmod 600 {tls.key_file}")


def test_the_certificates_of_clients_expire_too(tls: TlsConfig, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(Authority().certificate)  # for an hour
    found = check_certificates(TlsConfig(tls.cert_file, tls.key_file, ca_file))
    assert found.verdict is Verdict.WARN
    assert str(ca_file) in found.found


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path / "tenants.yaml")
    file.add("acme")
    file.path.chmod(0o640)
    return file


def test_tenants_that_are_kept_safe_are_right(tenants: TenantsFile) -> None:
    found = check_tenants(SecurityConfig(tenants_file=tenants.path))
    assert (found.verdict, found.found) == (Verdict.OK, f"{tenants.path}: 1 tenants, 1 keys")
    assert check_tenants(SecurityConfig()).verdict is Verdict.OK


@pytest.mark.parametrize(("mode", "verdict"), [(0o666, Verdict.FAIL), (0o644, Verdict.WARN)])
def test_a_file_of_tenants_that_others_have_is_told(
    tenants: TenantsFile, mode: int, verdict: Verdict
) -> None:
    tenants.path.chmod(mode)
    assert check_tenants(SecurityConfig(tenants_file=tenants.path)).verdict is verdict


def test_keys_that_have_expired_are_named(tenants: TenantsFile) -> None:
    key = tenants.add("old", expires=datetime.now(UTC) + timedelta(days=1))
    tenants.path.chmod(0o640)
    found = check_tenants(SecurityConfig(tenants_file=tenants.path), LATER)
    assert found.verdict is Verdict.WARN
    assert key.split("_")[1] in found.found
    assert key not in found.found


def test_a_file_of_tenants_that_is_none_fails(tenants: TenantsFile) -> None:
    tenants.path.write_text("tenants: {}")
    assert check_tenants(SecurityConfig(tenants_file=tenants.path)).verdict is Verdict.FAIL
