"""Who may call: TLS, API keys, JSON web tokens, and what each tenant is allowed."""

from __future__ import annotations

from draftgate.gateway.auth.authenticator import Authenticator
from draftgate.gateway.auth.config import JwtConfig, SecurityConfig, ServerLimits, TlsConfig
from draftgate.gateway.auth.interceptor import AuthInterceptor
from draftgate.gateway.auth.keys import ApiKey, new_key
from draftgate.gateway.auth.problems import security_problems
from draftgate.gateway.auth.tls import ServerCertificates

__all__ = [
    "ApiKey",
    "AuthInterceptor",
    "Authenticator",
    "JwtConfig",
    "SecurityConfig",
    "ServerCertificates",
    "ServerLimits",
    "TlsConfig",
    "new_key",
    "security_problems",
]
