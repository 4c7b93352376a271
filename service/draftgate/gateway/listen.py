"""The address that the gateway listens on, and why it cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["HeldPort", "bind", "check_address", "check_listen", "is_loopback"]


def bind(
    server: grpc.aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None = None,
    *,
    insecure: bool = False,
    shared: bool = False,
) -> int:
    """Let `server` listen on `listen`, host:port; the port it got.

    Without `credentials` it speaks clear text, beyond loopback only if `insecure`. shared: others
    of the same user may hold the port and share it. Raises DraftgateError(FAILED_PRECONDITION) with
    one line that says what is wrong.
    """
    check_listen(listen, secured=insecure or credentials is not None, shared=shared)
    try:
        if credentials is not None:
            return server.add_secure_port(listen, credentials)
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise _unusable(listen, "the address is not usable") from error


def check_listen(listen: str, *, secured: bool, shared: bool = False) -> None:
    """Raise DraftgateError(FAILED_PRECONDITION) if nothing could listen on `listen` now, or if
    other machines could reach it though it is not `secured`. shared: as for `bind`.

    gRPC says why only in its log, cuts ports to 16 bits, and is content with one of the addresses
    of a name even if the other one is taken.
    """
    for each in _bound(listen, secured=secured, shared=shared):
        each.close()


def check_address(listen: str, *, secured: bool) -> None:
    """As `check_listen`, but whether the port is free: it may be this service's own."""
    _addresses(listen, secured=secured)


class HeldPort:
    """A port that is held for processes that share it, and stays the same while they come and go.
    Nobody listens here: connections go to those that do."""

    def __init__(self, listen: str, *, secured: bool) -> None:
        """Raises DraftgateError as `check_listen` does, also if somebody else shares the port."""
        host = listen.rpartition(":")[0]
        check_listen(listen, secured=secured)
        self._sockets = _bound(listen, secured=secured, shared=True)
        self.port: int = self._sockets[0].getsockname()[1]
        self.listen = f"{host}:{self.port}"
        """What those processes listen on."""

    def close(self) -> None:
        """Let go of it."""
        for each in self._sockets:
            each.close()


def _bound(listen: str, *, secured: bool, shared: bool) -> list[socket.socket]:
    """A socket bound to each of the addresses of `listen`, as far as this machine has them."""
    port = listen.rpartition(":")[2]
    bound: list[socket.socket] = []
    problems: list[OSError] = []
    for family, address in _addresses(listen, secured=secured):
        try:
            bound.append(_bind(family, address, bound, shared=shared))
        except OSError as error:
            problems.append(error)
    taken = next((each for each in problems if each.errno == errno.EADDRINUSE), None)
    if bound and not taken:
        return bound
    for each in bound:
        each.close()
    if taken:
        message = f"port {port} is in use; stop what uses it or choose another port"
        raise _unusable(listen, message) from taken
    raise _unusable(listen, problems[0].strerror or str(problems[0])) from problems[0]


def _addresses(listen: str, *, secured: bool) -> list[tuple[int, tuple[Any, ...]]]:
    """Family and address of each that `listen` stands for."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise _unusable(listen, "give host:port with a port from 0 to 65535")
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _unusable(listen, f"the host is unknown ({error.strerror})") from error
    if not secured and not (host and all(is_loopback(each[4][0]) for each in found)):
        raise _unusable(
            listen,
            "other machines could reach it in clear text; set up TLS (security.tls in the "
            "configuration), or allow it with --insecure",
        )
    return [(family, address) for family, _, _, _, address in found]


def is_loopback(address: str | int) -> bool:
    """Whether an address, as getaddrinfo tells it, is of this machine alone."""
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _bind(
    family: int, address: tuple[Any, ...], bound: Sequence[socket.socket], *, shared: bool
) -> socket.socket:
    """Bind `address`, as getaddrinfo made it. shared: port 0 is that of what is `bound` already."""
    if shared and bound and not address[1]:
        address = (address[0], bound[0].getsockname()[1], *address[2:])
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As gRPC does: connections of an earlier server that linger do not count.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _unusable(listen: str, problem: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"cannot listen on {listen}: {problem}")
