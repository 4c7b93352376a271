"""Calls on a `StreamChannel`, and what comes of them."""

from __future__ import annotations

import grpc
import pytest

from draftgate.upstream.http2 import KeepAlive
from draftgate.upstream.streams import CallError, StreamChannel

__all__ = ["METHOD", "PATIENT", "called", "failure"]

METHOD = "/some.Service/Method"
PATIENT = KeepAlive(after_s=330.0, timeout_s=20.0)


async def called(
    channel: StreamChannel, request: bytes = b"", metadata: tuple[tuple[str, str], ...] = ()
) -> list[bytes]:
    """All responses to a call. Raises CallError."""
    found: list[bytes] = []
    await channel.call(METHOD, request, metadata, found.append)
    return found


async def failure(channel: StreamChannel) -> tuple[grpc.StatusCode, str]:
    """What a call fails with; it has to."""
    with pytest.raises(CallError) as raised:
        await called(channel)
    return raised.value.code(), raised.value.details()
