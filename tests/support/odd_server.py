"""A server of HTTP/2 that answers as a test wants, and a channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

from draftgate.upstream.http2 import KeepAlive
from draftgate.upstream.streams import StreamChannel
from tests.support.stream_calls import PATIENT

__all__ = ["OddServer", "odd_server"]


class OddServer:
    """Answers the first request of every connection with bytes of the test's; None: it says nothing
    at all, ever."""

    def __init__(self, answer: Callable[[H2Connection], bytes] | None) -> None:
        self.received = b""
        self.running: set[asyncio.Task[None]] = set()
        self._answer = answer

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        h2 = H2Connection(H2Configuration(client_side=False))
        h2.initiate_connection()
        answer = self._answer
        while content := await reader.read(65_536):
            self.received += content
            if self._answer is None:
                continue
            for event in h2.receive_data(content):
                if isinstance(event, RequestReceived) and answer is not None:
                    writer.write(h2.data_to_send() + answer(h2))
                    answer = None
            writer.write(h2.data_to_send())
        writer.close()


@asynccontextmanager
async def odd_server(
    answer: Callable[[H2Connection], bytes] | None, keep_alive: KeepAlive = PATIENT
) -> AsyncIterator[tuple[StreamChannel, OddServer]]:
    found = OddServer(answer)
    server = await asyncio.start_server(found.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = StreamChannel(f"127.0.0.1:{port}", keep_alive)
    try:
        yield channel, found
    finally:
        await channel.close()
        server.close()
        if found.running:
            await asyncio.wait(found.running)
        for task in found.running:
            task.result()
