"""How a command reaches a server that asks who is there."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["open_channel"]

API_KEY = "DRAFTGATE_API_KEY"
"""The variable with an API key or a token."""
CA_FILE = "DRAFTGATE_CA_FILE"
"""The variable that names the certificates to trust, PEM; with it the server has to speak TLS."""

# The gateway is named by the user: a proxy from the environment is not meant.
_OPTIONS = (("grpc.enable_http_proxy", 0),)

_Call = TypeVar("_Call")


def open_channel(server: str) -> grpc.aio.Channel:
    """A channel to `server`, HOST:PORT, with what the environment says about access.

    Raises DraftgateError(NOT_FOUND) for certificates that cannot be read.
    """
    key, ca_file = os.environ.get(API_KEY, ""), os.environ.get(CA_FILE, "")
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if key:
        interceptors = [_UnaryAuthorization(key), _StreamAuthorization(key)]
    if not ca_file:
        return grpc.aio.insecure_channel(server, options=_OPTIONS, interceptors=interceptors)
    try:
        trusted = Path(ca_file).read_bytes()
    except OSError as error:
        raise DraftgateError(
            ErrorCode.NOT_FOUND, f"{CA_FILE}: {ca_file} cannot be read: {error.strerror}"
        ) from error
    return grpc.aio.secure_channel(
        server, grpc.ssl_channel_credentials(trusted), options=_OPTIONS, interceptors=interceptors
    )


class _Authorization:
    def __init__(self, key: str) -> None:
        self._header = ("authorization", f"Bearer {key}")

    async def _call(
        self,
        continuation: Callable[[Any, Any], Awaitable[_Call]],
        details: Any,
        request: Any,
    ) -> _Call:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return await continuation(details._replace(metadata=metadata), request)


class _UnaryAuthorization(_Authorization, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await self._call(continuation, client_call_details, request)


class _StreamAuthorization(_Authorization, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await self._call(continuation, client_call_details, request)
