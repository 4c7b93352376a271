"""Where replicas are: addresses as they are configured, and names looked up."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument

__all__ = ["Addresses", "DnsName", "parse_addresses", "resolve"]

_DNS = "dns:///"
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>[0-9]{1,5})")
_ALLOWED = "HOST:PORT or dns:///NAME:PORT, several separated by commas"


@dataclass(frozen=True)
class DnsName:
    """A name that stands for as many replicas as it has addresses."""

    host: str
    port: int


@dataclass(frozen=True)
class Addresses:
    """Where the replicas are, as configured."""

    static: tuple[str, ...]
    """Each host:port is one replica."""
    names: tuple[DnsName, ...] = ()


def parse_addresses(text: str, *, field: str = "triton_target") -> Addresses:
    """`HOST:PORT` or `dns:///NAME:PORT`, several separated by commas.

    Raises DraftgateError(INVALID_ARGUMENT) for anything else, naming the `field` it was given in.
    """
    static: list[str] = []
    names: list[DnsName] = []
    for part in text.split(","):
        address = part.strip()
        found = _ADDRESS.fullmatch(address.removeprefix(_DNS))
        if found is None or not 1 <= int(found["port"]) <= 65535:
            raise invalid_argument(field, address, _ALLOWED)
        if address.startswith(_DNS):
            names.append(DnsName(found["host"], int(found["port"])))
        else:
            static.append(address)
    doubles = len(static) - len(set(static)) + len(names) - len(set(names))
    if doubles:
        raise invalid_argument(field, text, f"{_ALLOWED}, none of them twice")
    return Addresses(tuple(static), tuple(names))


async def resolve(name: DnsName, timeout_s: float) -> tuple[str, ...]:
    """The addresses of a name now, as host:port, in order. The event loop goes on meanwhile.

    Raises DraftgateError(UNAVAILABLE) if it cannot be looked up.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except TimeoutError as error:
        raise DraftgateError(
            ErrorCode.UNAVAILABLE, f"{name.host} was not looked up within {timeout_s:g} s"
        ) from error
    except (OSError, UnicodeError) as error:  # UnicodeError: a label is empty or too long.
        raise DraftgateError(
            ErrorCode.UNAVAILABLE, f"{name.host} cannot be looked up: {error}"
        ) from error
    addresses = set()
    for family, _, _, _, address in found:
        host = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        addresses.add(f"{host}:{name.port}")
    return tuple(sorted(addresses))
