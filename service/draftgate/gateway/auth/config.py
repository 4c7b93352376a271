"""Who may call, and how much of the server's memory a call may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from draftgate.errors import invalid_argument

__all__ = ["PUBLIC_KEY_ALGORITHMS", "JwtConfig", "SecurityConfig", "ServerLimits", "TlsConfig"]

PUBLIC_KEY_ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""Signatures that only the issuer can make. With the others, whoever checks could sign too."""


@dataclass(frozen=True)
class TlsConfig:
    """The server's certificate; files that change are taken up without a restart."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    cert_file: Path
    """The certificate and those that signed it, PEM."""
    key_file: Path
    """Its private key, PEM, not encrypted."""
    client_ca_file: Path | None = None
    """Only clients with a certificate signed by one of these may connect (mTLS)."""


@dataclass(frozen=True)
class JwtConfig:
    """JSON web tokens that somebody else issues."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    jwks_file: Path
    """The issuer's public keys, a JSON Web Key Set."""
    issuer: Annotated[str, Field(min_length=1)]
    """What `iss` has to be."""
    audience: Annotated[str, Field(min_length=1)]
    """What `aud` has to be or hold."""
    algorithms: Annotated[tuple[str, ...], Field(min_length=1)] = ("RS256", "ES256")
    """Signatures that count. Those with a shared secret do not."""
    tenant_claim: Annotated[str, Field(min_length=1)] = "sub"
    """The claim that names the tenant, who has to stand in the file of tenants."""
    leeway_s: Annotated[float, Field(ge=0, le=600)] = 30.0
    """How far the clocks may be apart."""

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) for an algorithm that has a shared secret."""
        for each in self.algorithms:
            if each not in PUBLIC_KEY_ALGORITHMS:
                allowed = ", ".join(sorted(PUBLIC_KEY_ALGORITHMS))
                raise invalid_argument("security.jwt.algorithms", each, allowed)


@dataclass(frozen=True)
class ServerLimits:
    """What one client can take without being let in."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    max_request_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 4 * 2**20
    """Largest message from a client."""
    max_metadata_bytes: Annotated[int, Field(ge=1024, le=2**20)] = 16 * 2**10
    """Largest set of headers of one call."""
    max_streams_per_connection: Annotated[int, Field(ge=1, le=2**20)] = 4096
    """Calls at once on one connection; a client holds the next ones back."""
    max_connections: Annotated[int, Field(ge=1, le=2**20)] = 10_000
    """Connections at once; more are closed before their handshake."""


@dataclass(frozen=True)
class SecurityConfig:
    """Nothing of it is on by itself, and the server then listens on loopback only."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tls: TlsConfig | None = None
    """None speaks clear text."""
    insecure: bool = False
    """Listen beyond loopback without TLS: somebody else keeps the network safe."""
    tenants_file: Path | None = None
    """Tenants with their limits and the hashes of their API keys, YAML; None asks for no
    credentials."""
    jwt: JwtConfig | None = None
    """Take JSON web tokens too. Needs `tenants_file`."""
    open_reflection: bool = True
    """Reflection needs no credentials, like the health service."""
    reload_interval_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0
    """Time between two looks at whether a file has changed."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) for tokens whose tenants are known nowhere."""
        if self.jwt and not self.tenants_file:
            raise invalid_argument("security.tenants_file", None, "a file of tenants, with jwt")
