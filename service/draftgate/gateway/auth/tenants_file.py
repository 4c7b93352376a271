"""The file of tenants: their limits, their scopes and the hashes of their API keys.

tenants:
  acme:
    limits: {weight: 2, max_concurrency: 16, tokens_per_minute: 100000}
    scopes: [generate]
    keys:
      - {id: 0123456789abcdef, sha256: ..., expires: 2027-01-01T00:00:00Z}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from draftgate import yamlfile
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.auth.keys import ApiKey
from draftgate.gateway.tenant import NAME_PATTERN, Scope, Tenant, TenantLimits

__all__ = ["Directory", "read_directory"]


@dataclass(frozen=True)
class Directory:
    """Everybody who may call."""

    tenants: Mapping[str, Tenant]
    """By name."""
    keys: Mapping[str, tuple[ApiKey, Tenant]]
    """By the key's id."""


def read_directory(path: Path) -> Directory:
    """Raises DraftgateError naming the file and what in it is wrong."""
    parsed = yamlfile.parse(_File, yamlfile.read_mapping(path), path)
    tenants: dict[str, Tenant] = {}
    keys: dict[str, tuple[ApiKey, Tenant]] = {}
    for name, entry in parsed.tenants.items():
        tenant = Tenant(name, TenantLimits(**entry.limits.model_dump()), frozenset(entry.scopes))
        tenants[name] = tenant
        for key in entry.keys:
            if key.id in keys:
                raise DraftgateError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"{path}: tenants.{name}.keys: the id {key.id} stands there twice",
                )
            keys[key.id] = ApiKey(key.id, key.sha256, key.expires), tenant
    return Directory(tenants, keys)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Limits(_Strict):
    weight: float = Field(default=1.0, ge=0.01, le=1000, allow_inf_nan=False)
    max_concurrency: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)


class _Key(_Strict):
    id: str = Field(pattern="^[0-9a-f]{16}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    expires: AwareDatetime | None = None


class _Tenant(_Strict):
    limits: _Limits = Field(default_factory=_Limits)
    scopes: list[Scope] = Field(default=[Scope.GENERATE], min_length=1)
    keys: list[_Key] = []


_Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class _File(_Strict):
    tenants: dict[_Name, _Tenant] = Field(min_length=1)
