"""Checks of the settings and of the files that they name."""

from __future__ import annotations

import asyncio
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftgate.cli.access import reaching
from draftgate.cli.doctor.result import Result, fail, ok, warn
from draftgate.config import Settings, load
from draftgate.errors import DraftgateError
from draftgate.gateway.auth import Authenticator, SecurityConfig, ServerCertificates, TlsConfig
from draftgate.gateway.auth.tenants_file import read_directory
from draftgate.gateway.listen import check_listen

__all__ = ["check_certificates", "check_listener", "check_settings", "check_tenants", "expiry"]

_SOON = timedelta(days=14)
_ANSWER_TIMEOUT_S = 2.0
_RENEW = "renew it; a new file is taken up without a restart"


def check_settings(file: Path | None) -> tuple[Settings | None, Result]:
    """What is set by a file and the environment; None if that cannot be."""
    try:
        loaded = load(file)
    except DraftgateError as error:
        return None, fail("settings", error.message)
    count = len([each for each in loaded.lines() if each[2] != "default"])
    return loaded.settings, ok("settings", f"{file or 'no file'}: {count} are not the default")


def check_listener(name: str, listen: str, security: SecurityConfig) -> Result:
    """Whether a server could listen there, or one of ours already does."""
    try:
        check_listen(listen, secured=bool(security.tls) or security.insecure)
    except DraftgateError as error:
        if asyncio.run(_answers(listen)):
            return ok(
                name, f"a gateway serves on {listen}: `draftgate doctor {listen}` looks at it"
            )
        return fail(name, error.message)
    return ok(name, f"{listen} is free")


def check_certificates(tls: TlsConfig | None, now: datetime | None = None) -> Result:
    if tls is None:
        return ok("certificates", "none: clear text")
    try:
        ServerCertificates(tls)
        soonest, of = min((_not_after(path), path) for path in _certificates(tls))
        begins = max(each.not_valid_before_utc for each in _read(tls.cert_file))
    except DraftgateError as error:
        return fail("certificates", error.message)
    now = now or datetime.now(UTC)
    if begins > now:
        return fail("certificates", f"{tls.cert_file} is valid only from {begins:%Y-%m-%d}")
    result = expiry("certificates", f"{of}", soonest, now)
    if result.remedy:
        return result
    if _others_may(tls.key_file, stat.S_IRGRP | stat.S_IROTH):
        return warn("certificates", f"others may read {tls.key_file}", f"chmod 600 {tls.key_file}")
    return result


def check_tenants(security: SecurityConfig, now: datetime | None = None) -> Result:
    """The file of tenants with their keys, and the one with the keys of tokens."""
    file = security.tenants_file
    if file is None:
        return ok("tenants", "no credentials are asked for")
    try:
        Authenticator(security)
        directory = read_directory(file)
    except DraftgateError as error:
        return fail("tenants", error.message)
    if _others_may(file, stat.S_IWGRP | stat.S_IWOTH):
        return fail("tenants", f"others may write {file}: they could let anybody in", "chmod 600")
    now = now or datetime.now(UTC)
    expired = [key.id for key, _ in directory.keys.values() if key.expires and key.expires <= now]
    if expired:
        shown = f"{file}: expired are the keys {', '.join(expired)}"
        return warn("tenants", shown, "take them out, or make new ones: draftgate keys new")
    if _others_may(file, stat.S_IROTH):
        return warn("tenants", f"everybody may read {file}", f"chmod 640 {file}")
    return ok("tenants", f"{file}: {len(directory.tenants)} tenants, {len(directory.keys)} keys")


def expiry(name: str, what: str, not_after: datetime, now: datetime) -> Result:
    """How long a certificate is still valid."""
    shown = f"{what} is valid until {not_after:%Y-%m-%d %H:%M} UTC"
    if not_after <= now:
        return fail(name, f"{what} has expired at {not_after:%Y-%m-%d %H:%M} UTC", _RENEW)
    return warn(name, shown, _RENEW) if not_after - now < _SOON else ok(name, shown)


async def _answers(address: str) -> bool:
    """Whether a gateway does there."""
    try:
        async with reaching(address) as gateway:
            stub = health_pb2_grpc.HealthStub(gateway.channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_TIMEOUT_S)
    except (grpc.aio.AioRpcError, DraftgateError):
        return False
    return True


def _certificates(tls: TlsConfig) -> list[Path]:
    return [tls.cert_file, *([tls.client_ca_file] if tls.client_ca_file else [])]


def _read(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


def _not_after(path: Path) -> datetime:
    return min(each.not_valid_after_utc for each in _read(path))


def _others_may(path: Path, mode: int) -> bool:
    return bool(path.stat().st_mode & mode)
