"""What is wrong with the files of who may call."""

from __future__ import annotations

from collections.abc import Iterator

from draftgate.errors import DraftgateError
from draftgate.gateway.auth.config import SecurityConfig
from draftgate.gateway.auth.tenants_file import read_directory
from draftgate.gateway.auth.tls import tls_problems
from draftgate.gateway.auth.tokens import TokenVerifier

__all__ = ["security_problems"]


def security_problems(config: SecurityConfig) -> Iterator[DraftgateError]:
    """Everything for which a server, or a reload, would refuse them. Blocks to read them."""
    if config.tls:
        yield from tls_problems(config.tls)
    if config.tenants_file:
        try:
            read_directory(config.tenants_file)
        except DraftgateError as error:
            yield error
    if config.jwt:
        try:
            TokenVerifier(config.jwt)
        except DraftgateError as error:
            yield error
