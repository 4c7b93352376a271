"""The address that the gateway listens on, and why it cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import socket

import grpc
import grpc.aio

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["bind", "check_listen", "is_loopback"]


def bind(
    server: grpc.aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None = None,
    *,
    insecure: bool = False,
) -> int:
    """Let `server` listen on `listen`, host:port; the port it got.

    Without `credentials` it speaks clear text, beyond loopback only if `insecure`. Raises
    DraftgateError(FAILED_PRECONDITION) with one line that says what is wrong.
    """
    check_listen(listen, secured=insecure or credentials is not None)
    try:
        if credentials is not None:
            return server.add_secure_port(listen, credentials)
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise _unusable(listen, "the address is not usable") from error


def check_listen(listen: str, *, secured: bool) -> None:
    """Raise DraftgateError(FAILED_PRECONDITION) if nothing could listen on `listen` now, or if
    other machines could reach it though it is not `secured`.

    gRPC says why only in its log, cuts ports to 16 bits, and is content with one of the addresses
    of a name even if the other one is taken.
    """
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
    problems = [_bind_problem(family, address) for family, _, _, _, address in found]
    for problem in problems:
        if problem is not None and problem.errno == errno.EADDRINUSE:
            message = f"port {port} is in use; stop what uses it or choose another port"
            raise _unusable(listen, message) from problem
    first = problems[0]
    if first is not None and None not in problems:
        raise _unusable(listen, first.strerror or str(first)) from first


def is_loopback(address: str | int) -> bool:
    """Whether an address, as getaddrinfo tells it, is of this machine alone."""
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _bind_problem(family: int, address: object) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of an earlier server that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)  # type: ignore[arg-type]  # as getaddrinfo made it
    except OSError as error:
        return error
    return None


def _unusable(listen: str, problem: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"cannot listen on {listen}: {problem}")
