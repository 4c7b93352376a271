"""How a command reaches a server that asks who is there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from draftgate.client.aio import AsyncTransport
from draftgate.client.connection import Connection, Tls
from draftgate.client.retry import RetryPolicy
from draftgate.errors import DraftgateError

__all__ = ["open_transport", "reaching"]

API_KEY = "DRAFTGATE_API_KEY"
"""The variable with an API key or a token."""
CA_FILE = "DRAFTGATE_CA_FILE"
"""The variable that names the certificates to trust, PEM; with it the server has to speak TLS."""


def open_transport(server: str) -> AsyncTransport:
    """A connection to `server`, HOST:PORT, with what the environment says about access.

    Raises DraftgateError(NOT_FOUND) for certificates that cannot be read.
    """
    key, ca_file = os.environ.get(API_KEY, ""), os.environ.get(CA_FILE, "")
    connection = Connection(
        server,
        credentials=key or None,
        tls=Tls(ca_file) if ca_file else None,
        # Who sets the key for a server without certificates means that server.
        insecure=True,
    )
    try:
        # A user who waits wants to know why: what was turned away is not tried again.
        return AsyncTransport(connection, RetryPolicy(max_attempts=1))
    except DraftgateError as error:
        message = error.message.replace("tls.ca_file", CA_FILE, 1)
        raise DraftgateError(error.code, message) from error


@asynccontextmanager
async def reaching(server: str) -> AsyncIterator[AsyncTransport]:
    """`open_transport`, closed at the end."""
    transport = open_transport(server)
    try:
        yield transport
    finally:
        await transport.close()
