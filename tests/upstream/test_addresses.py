"""Addresses of replicas, written down and looked up."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.addresses import Addresses, DnsName, parse_addresses, resolve


@pytest.mark.parametrize(
    ("text", "static", "names"),
    [
        ("127.0.0.1:8001", ["127.0.0.1:8001"], []),
        ("a:1, b.example:65535,[::1]:8001", ["a:1", "b.example:65535", "[::1]:8001"], []),
        ("dns:///triton.svc:8001", [], [DnsName("triton.svc", 8001)]),
        ("a:1,dns:///b:2", ["a:1"], [DnsName("b", 2)]),
    ],
)
def test_addresses_are_read(text: str, static: list[str], names: list[DnsName]) -> None:
    assert parse_addresses(text) == Addresses(tuple(static), tuple(names))


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "a:x", "a:1 b:2", "a:1,a:1"),
        *("dns:///a", "dns://a:1", "dns:///a:1,dns:///a:1", "http://a:1", "a/b:1"),
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(DraftgateError, match=r"^triton_target: got '") as caught:
        parse_addresses(text)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "triton_target"


async def test_a_name_is_looked_up() -> None:
    found = await resolve(DnsName("localhost", 8001), 30.0)
    assert "127.0.0.1:8001" in found or "[::1]:8001" in found
    assert list(found) == sorted(set(found))


async def test_addresses_are_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: Any, **__: Any) -> list[Any]:
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8001))
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0))
        return [four, six, four]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
    assert await resolve(DnsName("x", 8001), 1.0) == ("10.0.0.2:8001", "[fd00::1]:8001")


async def test_a_name_that_is_none_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(DraftgateError, match=r"a\.\.b cannot be looked up: ") as caught:
        await resolve(DnsName("a..b", 8001), 1.0)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    with pytest.raises(DraftgateError, match=r"x cannot be .*: .*Name or service") as caught:
        await resolve(DnsName("x", 8001), 1.0)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_name_server_that_is_silent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs(*_: Any, **__: Any) -> list[Any]:
        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hangs)
    with pytest.raises(DraftgateError, match=r"within 0\.01 s"):
        await resolve(DnsName("x", 8001), 0.01)
