"""Calls every method of a server with requests that no client should send, and judges the answers.

The methods are those that reflection lists, so that a new one is called without being named here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from tests.support.hostile import Hostile
from tests.support.reflected import Method

__all__ = ["Fuzzer"]

_NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
_TRITONS = "inference.GRPCInferenceService"
"""Its models need not do all that its methods offer, and what it says is Triton's to say."""
_LONGEST_STATUS = 2000
_OF_THE_CLIENT = "Internal error from Core"
"""What the client says where a call had ended before all was sent: the status itself is lost."""
_AT_ONCE = 16


@dataclass(frozen=True)
class _Plan:
    """One call: what is sent, and how it is left."""

    number: int
    method: Method
    messages: Sequence[bytes]
    metadata: Sequence[tuple[str, str | bytes]]
    half_close: bool
    reads: int
    """Answers to read; then the call is cancelled, if it has not ended."""
    timeout_s: float

    def __str__(self) -> str:
        sent = ", ".join(content[:300].hex() for content in self.messages)
        return f"request {self.number}: {self.method.path} [{sent}] {str(self.metadata)[:300]}"


@dataclass
class Fuzzer:
    """Draws its calls from one seed: the same calls come again with the same seed."""

    methods: Sequence[Method]
    good: Mapping[str, Sequence[Message]]
    """Requests that would do, by the name of their message."""
    words: Sequence[str]
    """Texts that the server takes seriously: names of models, roles."""
    seed: int
    codes: Counter[str] = field(default_factory=Counter)
    """How often each status came, by `method CODE`."""
    wrong: list[str] = field(default_factory=list)
    """Each answer that should never be."""

    def __post_init__(self) -> None:
        self._hostile = Hostile(self.seed, self.words)
        self._draw = self._hostile.random

    async def run(self, channels: Sequence[grpc.aio.Channel], count: int) -> None:
        """Make so many calls, some at a time."""
        numbers = iter(range(count))

        async def work(channel: grpc.aio.Channel) -> None:
            for number in numbers:
                await self._call(channel, self._plan(number))

        await asyncio.gather(*(work(channels[n % len(channels)]) for n in range(_AT_ONCE)))

    def _plan(self, number: int) -> _Plan:
        draw = self._draw
        method = self.methods[number % len(self.methods)]
        count = 1
        if method.streams_in:
            count = draw.choice((0, 1, 1, 2, 3, 6))
        elif draw.random() < 0.05:
            count = draw.choice((0, 2))
        endless = method.streams_out or method.streams_in or count == 0
        return _Plan(
            number,
            method,
            [self._content(method) for _ in range(count)],
            self._hostile.metadata(),
            half_close=draw.random() < (0.7 if method.streams_in else 0.97),
            reads=draw.choice((0, 1, 2, 12, 12)) if endless else draw.choice((0, 2, 2, 2, 2)),
            timeout_s=draw.choice((0.001, 0.02, 0.2, 0.3)) if endless else 1.0,
        )

    def _content(self, method: Method) -> bytes:
        draw = self._draw
        name = method.request.DESCRIPTOR.full_name
        good = draw.choice(self.good.get(name) or (method.request(),))
        # The same message of the server's own making.
        request = method.request.FromString(good.SerializeToString())
        kind = draw.random()
        if kind < 0.15:
            return request.SerializeToString()
        if kind < 0.55:
            return self._hostile.spoiled(request).SerializeToString()
        if kind < 0.75:
            return self._hostile.message(method.request).SerializeToString()
        return self._hostile.content(request.SerializeToString())

    async def _call(self, channel: grpc.aio.Channel, plan: _Plan) -> None:
        # A call that streams both ways can send any number of messages to any kind of method.
        call: Any = channel.stream_stream(plan.method.path)(
            timeout=plan.timeout_s, metadata=plan.metadata
        )
        try:
            await self._talk(call, plan)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # It has ended before all was said; its status is looked at below.
        except DecodeError as error:
            self.wrong.append(f"{plan}: an answer that is no {plan.method.response}: {error}")
        call.cancel()
        self._judge(plan, await call.code(), await call.details() or "")

    async def _talk(self, call: Any, plan: _Plan) -> None:
        for content in plan.messages:
            await call.write(content)
        if plan.half_close:
            await call.done_writing()
        for _ in range(plan.reads):
            answer = await call.read()
            if answer is grpc.aio.EOF:
                return
            plan.method.response.FromString(answer)

    def _judge(self, plan: _Plan, code: grpc.StatusCode, details: str) -> None:
        if details == _OF_THE_CLIENT:
            return
        self.codes[f"{plan.method.name} {code.name}"] += 1
        own = plan.method.service != _TRITONS
        lacks = own and code is grpc.StatusCode.UNIMPLEMENTED
        if code in _NEVER or lacks or (own and len(details) > _LONGEST_STATUS):
            self.wrong.append(f"{plan}: {code.name}: {details[:500]}")
