"""How a command reaches a server that asks who is there."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from draftgate.client.aio import AsyncTransport
from draftgate.client.connection import Connection, Tls
from draftgate.client.retry import RetryPolicy
from draftgate.errors import DraftgateError

__all__ = ["API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE", "connect", "open_transport", "reaching"]

API_KEY = "DRAFTGATE_API_KEY"
"""The variable with an API key or a token."""
CA_FILE = "DRAFTGATE_CA_FILE"
"""The variable that names the certificates to trust, PEM; with it the server has to speak TLS."""
CERT_FILE = "DRAFTGATE_CERT_FILE"
"""The variable that names the client's own certificate, PEM, for a server that asks for one ..."""
KEY_FILE = "DRAFTGATE_KEY_FILE"
"""... and the one that names its private key."""

_VARIABLES = {
    "credentials": API_KEY,
    "tls.ca_file": CA_FILE,
    "tls.cert_file": CERT_FILE,
    "tls.key_file": KEY_FILE,
}
"""Where each field of a connection comes from."""


def open_transport(server: str) -> AsyncTransport:
    """A connection to `server`, HOST:PORT, with what the environment says about access.

    Raises DraftgateError: NOT_FOUND for certificates that cannot be read, INVALID_ARGUMENT for a
    certificate without its key.
    """
    key, *tls = (os.environ.get(variable) or None for variable in _VARIABLES.values())
    try:
        connection = Connection(
            server,
            credentials=key,
            tls=Tls(*tls) if any(tls) else None,
            # Who sets the key for a server without certificates means that server.
            insecure=True,
        )
        # A user who waits wants to know why: what was turned away is not tried again.
        return AsyncTransport(connection, RetryPolicy(max_attempts=1))
    except DraftgateError as error:
        if error.field not in _VARIABLES:
            raise
        message = error.message.replace(error.field, _VARIABLES[error.field], 1)
        raise DraftgateError(error.code, message) from error


async def connect(address: str, context: ssl.SSLContext | None, timeout_s: float) -> Any:
    """Connect and leave; with `context` what TLS came to. Raises OSError or TimeoutError."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    tls = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return tls


@asynccontextmanager
async def reaching(server: str) -> AsyncIterator[AsyncTransport]:
    """`open_transport`, closed at the end."""
    transport = open_transport(server)
    try:
        yield transport
    finally:
        await transport.close()
