"""Who a call is made for, and what that tenant may do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "ANONYMOUS",
    "NAME_PATTERN",
    "Scope",
    "Tenant",
    "TenantLimits",
    "current_tenant",
    "set_tenant",
]


NAME_PATTERN = "^[A-Za-z0-9._:@/-]{1,128}$"
"""What a tenant may be called."""


class Scope(StrEnum):
    """What credentials may be good for."""

    GENERATE = "generate"
    """Everything but administration."""
    ADMIN = "admin"
    """Changing how the server works."""


@dataclass(frozen=True)
class TenantLimits:
    """How much of the server one tenant may take. None is no limit."""

    weight: float = 1.0
    """Share of the starts, against the other tenants that wait."""
    max_concurrency: int | None = None
    """Most generations at once, running and waiting."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs; a minute's worth may be taken at once."""
    max_prompt_tokens: int | None = None
    """Longest prompt; text counts as one token for each four bytes of UTF-8."""


@dataclass(frozen=True)
class Tenant:
    """Somebody who uses the server."""

    name: str
    limits: TenantLimits = field(default_factory=TenantLimits)
    scopes: frozenset[Scope] = frozenset({Scope.GENERATE})


ANONYMOUS = Tenant("anonymous", scopes=frozenset(Scope))
"""Everybody, where no credentials are asked for."""

_current: ContextVar[Tenant] = ContextVar("draftgate_tenant", default=ANONYMOUS)


def current_tenant() -> Tenant:
    """The tenant of the call that is being handled."""
    return _current.get()


def set_tenant(tenant: Tenant) -> None:
    """Handle the rest of this call for `tenant`."""
    _current.set(tenant)
