"""From credentials to a tenant."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.auth import keys
from draftgate.gateway.auth.config import SecurityConfig
from draftgate.gateway.auth.files import stamp
from draftgate.gateway.auth.tenants_file import Directory, read_directory
from draftgate.gateway.auth.tokens import TokenVerifier
from draftgate.gateway.tenant import Tenant

__all__ = ["Authenticator", "RefusedError"]

_log = logging.getLogger(__name__)

_HOW = "give an API key or a token as `authorization: Bearer ...`, or a key as `x-api-key`"


class RefusedError(DraftgateError):
    """Credentials that do not let their caller in."""

    def __init__(self, code: ErrorCode, message: str, *, tenant: str = "") -> None:
        """tenant: whose they are, if that is known."""
        super().__init__(code, message)
        self.tenant = tenant


@dataclass(frozen=True)
class _Known:
    """What the files said."""

    directory: Directory
    tokens: TokenVerifier | None
    stamp: tuple[object, ...]


class Authenticator:
    """Knows the tenants, their keys and whose tokens count."""

    def __init__(
        self,
        config: SecurityConfig,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Reads the files. Raises DraftgateError naming what is wrong with them.

        `config.tenants_file` must be there.
        """
        self._config = config
        self._clock = clock
        self._known = self._read()

    def reload(self) -> None:
        """Take up files that have changed, all of them or none.

        Raises DraftgateError and goes on with what was known if one is of no use.
        """
        if self._stamp() != self._known.stamp:
            self._known = self._read()
            _log.info("tenants and keys have been read again")

    async def watch(self) -> None:
        """Reload on changes until cancelled."""
        problem = ""
        while True:
            await asyncio.sleep(self._config.reload_interval_s)
            try:
                await asyncio.to_thread(self.reload)
                problem = ""
            except DraftgateError as error:
                if error.message != problem:
                    problem = error.message
                    _log.error("tenants and keys stay as they were: %s", problem)

    def tenant(self, metadata: Mapping[str, str | bytes]) -> Tenant:
        """For whom a call with these headers is made.

        Raises DraftgateError: UNAUTHENTICATED, or PERMISSION_DENIED for a token whose tenant may
        not call; a RefusedError where it is known whose the credentials are.
        """
        credentials = _credentials(metadata)
        known = self._known
        if credentials.startswith("dg_"):
            return self._of_key(credentials, known.directory)
        if known.tokens is None:
            raise _refused("the credentials are no API key of this server")
        claims = known.tokens.claims(credentials)
        name = known.tokens.tenant_name(claims)
        tenant = known.directory.tenants.get(name)
        if tenant is None:
            message = "the token's tenant may not use this server"
            raise RefusedError(ErrorCode.PERMISSION_DENIED, message, tenant=name)
        return dataclasses.replace(tenant, scopes=tenant.scopes & known.tokens.scopes(claims))

    def _of_key(self, key: str, directory: Directory) -> Tenant:
        found = directory.keys.get(keys.id_of(key))
        if found is None or not found[0].matches(key):
            raise _refused("the API key is not valid")
        entry, tenant = found
        # Said only to who holds the key.
        if entry.expires is not None and self._clock() >= entry.expires:
            message = "the API key has expired"
            raise RefusedError(ErrorCode.UNAUTHENTICATED, message, tenant=tenant.name)
        return tenant

    def _read(self) -> _Known:
        # Before the files are read: what changes meanwhile is read again.
        now = self._stamp()
        assert self._config.tenants_file is not None
        tokens = TokenVerifier(self._config.jwt) if self._config.jwt else None
        return _Known(read_directory(self._config.tenants_file), tokens, now)

    def _stamp(self) -> tuple[object, ...]:
        files: list[Path | None] = [self._config.tenants_file]
        if self._config.jwt:
            files.append(self._config.jwt.jwks_file)
        return tuple(stamp(each) for each in files if each)


def _credentials(metadata: Mapping[str, str | bytes]) -> str:
    key = metadata.get("x-api-key")
    if isinstance(key, str):
        return key.strip()
    authorization = metadata.get("authorization")
    if not isinstance(authorization, str):
        raise _refused(f"no credentials: {_HOW}")
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not value.strip():
        raise _refused(f"the authorization header is of another kind: {_HOW}")
    return value.strip()


def _refused(message: str) -> DraftgateError:
    return DraftgateError(ErrorCode.UNAUTHENTICATED, message)
