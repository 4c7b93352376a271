"""How a command reaches a server that asks who is there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from draftgate.client.aio import AsyncTransport
from draftgate.client.connection import Connection, Tls
from draftgate.client.retry import RetryPolicy
from draftgate.errors import DraftgateError

__all__ = ["API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE", "open_transport", "reaching"]

API_KEY = "DRAFTGATE_API_KEY"
"""The variable with an API key or a token."""
CA_FILE = "DRAFTGATE_CA_FILE"
"""The variable that names the certificates to trust, PEM; with it the server has to speak TLS."""
CERT_FILE = "DRAFTGATE_CERT_FILE"
"""The variable that names the client's own certificate, PEM, for a server that asks for one ..."""
KEY_FILE = "DRAFTGATE_KEY_FILE"
"""... and the one that names its private key."""

_FIELDS = {"tls.ca_file": CA_FILE, "tls.cert_file": CERT_FILE, "tls.key_file": KEY_FILE}


def open_transport(server: str) -> AsyncTransport:
    """A connection to `server`, HOST:PORT, with what the environment says about access.

    Raises DraftgateError: NOT_FOUND for certificates that cannot be read, INVALID_ARGUMENT for a
    certificate without its key.
    """
    ca_file, cert_file, key_file = (os.environ.get(name) or None for name in _FIELDS.values())
    try:
        connection = Connection(
            server,
            credentials=os.environ.get(API_KEY) or None,
            tls=Tls(ca_file, cert_file, key_file) if ca_file or cert_file or key_file else None,
            # Who sets the key for a server without certificates means that server.
            insecure=True,
        )
        # A user who waits wants to know why: what was turned away is not tried again.
        return AsyncTransport(connection, RetryPolicy(max_attempts=1))
    except DraftgateError as error:
        message = error.message
        for name, variable in {**_FIELDS, "credentials:": f"{API_KEY}:"}.items():
            message = message.replace(name, variable, 1)
        raise DraftgateError(error.code, message) from error


@asynccontextmanager
async def reaching(server: str) -> AsyncIterator[AsyncTransport]:
    """`open_transport`, closed at the end."""
    transport = open_transport(server)
    try:
        yield transport
    finally:
        await transport.close()
