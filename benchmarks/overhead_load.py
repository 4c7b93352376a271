"""Loads on the processes of `overhead_servers.py`, and what they cost those processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

import overhead_servers
from draftgate._pb.draftgate.v1 import generation_pb2, generation_pb2_grpc
from draftgate._pb.inference import grpc_service_pb2, grpc_service_pb2_grpc
from overhead_servers import RELAY_METHOD, text_of, triton_request

__all__ = ["KINDS", "Measured", "Server", "held_open", "measured", "served"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SETTLE_S = 0.5
_SERVING_TIMEOUT_S = 60.0

Texts = AsyncGenerator[str, None]


@dataclass(frozen=True)
class Server:
    """One of the processes."""

    pid: int
    address: str

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it has used, of all its threads."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK_S

    @property
    def resident_bytes(self) -> int:
        """Memory that is its own."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"process {self.pid} has no RssAnon")


@contextmanager
def served(*arguments: str) -> Iterator[Server]:
    """A process of `overhead_servers.py`, for as long as the context lasts."""
    command = [sys.executable, overhead_servers.__file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        if not port:
            raise RuntimeError(f"{' '.join(arguments)} ended early")
        try:
            yield Server(process.pid, f"127.0.0.1:{port}")
        finally:
            process.stdin.close()


@dataclass(frozen=True)
class Measured:
    """What one load came to."""

    messages: int
    """Those that the backend sent, however many they became."""
    cpu_us: float
    """CPU time of the process that was measured, a message."""
    events: int
    """Messages that the client got."""
    p50_ms: float
    """From when the backend sent a message to when the client had it."""
    p99_ms: float
    ttft_ms: float
    """The median from a call to its first message."""
    cores: float
    """What all processes together used, the client too."""


async def _direct(channel: grpc.aio.Channel, prompt: str) -> Texts:
    call = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
    await call.write(triton_request(prompt, f"direct-{id(call)}"))
    await call.done_writing()
    async for response in call:
        yield text_of(response)


async def _relayed(channel: grpc.aio.Channel, prompt: str) -> Texts:
    method: Any = channel.unary_stream(
        RELAY_METHOD, StringValue.SerializeToString, StringValue.FromString
    )
    async for response in method(StringValue(value=prompt)):
        yield response.value


async def _generated(channel: grpc.aio.Channel, prompt: str) -> Texts:
    request = generation_pb2.GenerateRequest(prompt=prompt, max_tokens=1 << 19)
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
    try:
        async for response in call:
            if response.HasField("tokens"):
                yield response.tokens.text
    finally:
        call.cancel()


KINDS: dict[str, Callable[[grpc.aio.Channel, str], Texts]] = {
    "direct": _direct,
    "relay": _relayed,
    "gateway": _generated,
}
"""How the load speaks to each kind of server."""


class _Streams:
    """Streams that run, and what they bring."""

    def __init__(self) -> None:
        self.latencies_ms: list[float] = []
        self.ttfts_ms: list[float] = []
        self.events = 0
        self.failure: BaseException | None = None

    def clear(self) -> None:
        """Begin to count anew."""
        self.latencies_ms = []
        self.events = 0

    async def read(self, texts: Texts) -> None:
        """Read one stream until cancelled."""
        began_s = time.monotonic()
        first = True
        async for text in texts:
            now_ns = time.monotonic_ns()
            if first:
                self.ttfts_ms.append((time.monotonic() - began_s) * 1e3)
                first = False
            self.events += 1
            self.latencies_ms += [(now_ns - int(sent_ns)) * 1e-6 for sent_ns in text.split()]


async def measured(
    kind: str,
    server: Server,
    *,
    prompt: str,
    streams: int,
    spread_s: float,
    seconds: float,
    backend: Server,
) -> Measured:
    """Run so many streams, begun over `spread_s`, for so long. Returns when the backend is idle.

    Raises grpc.aio.AioRpcError if a stream fails.
    """
    found = _Streams()
    async with _idle_behind(backend), _open(kind, server, prompt, streams, found, spread_s):
        await asyncio.sleep(_SETTLE_S)
        everybody = {server, backend}
        found.clear()
        began_s, cpu_s = time.monotonic(), server.cpu_s
        all_s = sum(each.cpu_s for each in everybody) + time.process_time()
        await asyncio.sleep(seconds)
        took_s, cpu_s = time.monotonic() - began_s, server.cpu_s - cpu_s
        all_s = sum(each.cpu_s for each in everybody) + time.process_time() - all_s
        latencies_ms, events = sorted(found.latencies_ms), found.events
    messages = len(latencies_ms)
    return Measured(
        messages=messages,
        cpu_us=cpu_s / messages * 1e6,
        events=events,
        p50_ms=latencies_ms[messages // 2],
        p99_ms=latencies_ms[messages * 99 // 100],
        ttft_ms=sorted(found.ttfts_ms)[len(found.ttfts_ms) // 2],
        cores=all_s / took_s,
    )


async def held_open(server: Server, *, prompt: str, streams: int) -> float:
    """Bytes that a stream of the gateway takes which has brought one event and then waits."""
    async with _open("gateway", server, prompt, 1, _Streams(), 0.0):
        before = server.resident_bytes
        async with _open("gateway", server, prompt, streams, _Streams(), streams / 500):
            await asyncio.sleep(_SETTLE_S)
            return (server.resident_bytes - before) / streams


@asynccontextmanager
async def _open(
    kind: str, server: Server, prompt: str, streams: int, found: _Streams, spread_s: float
) -> AsyncIterator[None]:
    """Streams that have brought their first message and go on, inside. Eight or more share a
    connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(server.address, options=options)
        for _ in range(min(8, -(-streams // 8)))
    ]
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        if kind == "gateway":
            await _serving(channels[0], prompt)
        for number in range(streams):
            texts = KINDS[kind](channels[number % len(channels)], prompt)
            tasks.append(asyncio.create_task(found.read(texts)))
            await asyncio.sleep(spread_s / streams)
        while len(found.ttfts_ms) < streams:
            _check(tasks)
            await asyncio.sleep(0.02)
        yield
        _check(tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(_SETTLE_S)  # For the other side to have ended them too.
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def _idle_behind(backend: Server) -> AsyncIterator[None]:
    """Wait at the end until nothing runs on the backend: it would count for the next load."""
    yield
    async with (
        asyncio.timeout(_SERVING_TIMEOUT_S),
        grpc.aio.insecure_channel(backend.address) as channel,
    ):
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = grpc_service_pb2.ServerLiveRequest()
        while not (await stub.ServerLive(request)).live:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.1)


def _check(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what a stream failed with; none may have ended."""
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a stream ended")


async def _serving(channel: grpc.aio.Channel, prompt: str) -> None:
    """Wait for the gateway to have found its Triton."""
    async with asyncio.timeout(_SERVING_TIMEOUT_S):
        while True:
            try:
                async with aclosing(_generated(channel, prompt)) as texts:
                    async for _ in texts:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.1)
