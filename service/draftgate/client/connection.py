"""Where the gateway is, how it is reached, and who calls: the same for both kinds of channel."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from draftgate import __version__
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.telemetry.propagation import outgoing_metadata

__all__ = ["Connection", "Credentials", "Metadata", "Tls"]

Metadata = tuple[tuple[str, str], ...]

Credentials = str | Callable[[], str]
"""An API key or a JSON web token, or a function that returns one: it is asked before each call, on
the caller's thread, so it must not block."""

_OPTIONS = (
    # The gateway is named by the user: a proxy from the environment is not meant.
    ("grpc.enable_http_proxy", 0),
    # Nor a retry policy from DNS: RetryPolicy is the only one. What gRPC still sends again is only
    # what no server has looked at.
    ("grpc.service_config_disable_resolution", 1),
    # Else clients of one process share a connection, and so one of the gateway's workers.
    ("grpc.use_local_subchannel_pool", 1),
    # One answer may hold a whole generation with its alternatives.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A gateway whose machine vanished is found without a write. It allows a ping every 10 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.primary_user_agent", f"draftgate-python/{__version__}"),
)


@dataclass(frozen=True)
class Tls:
    """What a TLS connection trusts and shows."""

    ca_file: Path | str | None = None
    """Certificates to trust, PEM; None: those that gRPC comes with."""
    cert_file: Path | str | None = None
    """The client's own certificate and those that signed it, PEM, for a server that asks (mTLS)."""
    key_file: Path | str | None = None
    """Its private key, PEM, not encrypted. Goes with `cert_file`."""
    server_name: str | None = None
    """The name in the server's certificate, where it is not the address's."""

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) for a certificate without its key, or a key
        without its certificate."""
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"tls.{missing}: got None, allowed: a file, with the other one",
                field=f"tls.{missing}",
            )


@dataclass(frozen=True)
class Connection:
    """A gateway as one caller sees it."""

    address: str
    """host:port, or what else gRPC takes for a target, such as unix:PATH."""
    credentials: Credentials | None = None
    """Who calls."""
    tls: Tls | None = None
    """None speaks clear text."""
    insecure: bool = False
    """Show `credentials` in clear text beyond this machine: somebody else keeps the network
    safe."""

    def __post_init__(self) -> None:
        """Raises DraftgateError: FAILED_PRECONDITION where others could read the credentials,
        INVALID_ARGUMENT for credentials that no header can hold."""
        if isinstance(self.credentials, str):
            _check(self.credentials)
        if self.credentials is None or self.tls or self.insecure or _is_local(self.address):
            return
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"others could read the credentials on their way to {self.address}, in clear text: set "
            "up TLS with tls=Tls(...), or allow it with insecure=True",
        )

    def channel(self) -> grpc.Channel:
        """A new channel. Raises DraftgateError(NOT_FOUND) for a file that cannot be read."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=self._options())
        return grpc.secure_channel(self.address, _shown(self.tls), options=self._options())

    def async_channel(self) -> grpc.aio.Channel:
        """The same for asyncio; it belongs to the event loop that runs now."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=self._options())
        return grpc.aio.secure_channel(self.address, _shown(self.tls), options=self._options())

    def metadata(self) -> Metadata:
        """What goes along with a call that is made now: credentials and trace context.

        Raises DraftgateError(INVALID_ARGUMENT) for credentials that no header can hold.
        """
        found = outgoing_metadata()
        if self.credentials is None:
            return found
        given = self.credentials
        if not isinstance(given, str):
            given = given()
            _check(given)
        return (("authorization", f"Bearer {given}"), *found)

    def _options(self) -> tuple[tuple[str, int | str], ...]:
        if self.tls is None or self.tls.server_name is None:
            return _OPTIONS
        return (*_OPTIONS, ("grpc.ssl_target_name_override", self.tls.server_name))


def _check(credentials: str) -> None:
    if not (credentials.isascii() and credentials.isprintable()):
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT,
            "credentials: got characters that no header can hold, allowed: printable ASCII",
            field="credentials",
        )


def _shown(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        _read("tls.ca_file", tls.ca_file),
        _read("tls.key_file", tls.key_file),
        _read("tls.cert_file", tls.cert_file),
    )


def _read(field: str, file: Path | str | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise DraftgateError(
            ErrorCode.NOT_FOUND, f"{field}: {file} cannot be read: {error.strerror}", field=field
        ) from error


def _is_local(address: str) -> bool:
    """Whether it never leaves this machine. Names are not looked up, which could block."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
