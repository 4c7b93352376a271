"""A strict gateway that answers from scripts.

It refuses what the real one would never accept, honours the request's flags as the proto describes
them, and fails the test on a call nobody scripted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from draftgate._pb.draftgate.v1.gate_pb2_grpc import add_GateServiceServicer_to_server
from draftgate._pb.draftgate.v1.generation_pb2 import (
    DRAFT_SOURCE_NGRAM,
    FINISH_REASON_EOS,
    GATE_REASON_FIXED,
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_TARGET,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    GenerationFinished,
    GenerationStarted,
    Speculation,
    Token,
    TokenChunk,
    VerifyStep,
)
from draftgate._pb.draftgate.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from draftgate._pb.draftgate.v1.model_pb2 import GetModelRequest, GetModelResponse, Model
from draftgate._pb.draftgate.v1.model_pb2_grpc import (
    ModelServiceServicer,
    add_ModelServiceServicer_to_server,
)
from tests.fakes.gate_service import FakeGateService

MODEL = Model(
    name="fake",
    architecture="LlamaForCausalLM",
    quantization="FP8",
    compute_dtype="bfloat16",
    vocab_size=49152,
    max_sequence_tokens=512,
    eos_token_ids=[2],
    has_chat_template=True,
    drafter="ngram",
    max_draft_len=4,
    max_batch_rows=8,
)


class Hang:
    """Step of a script: say nothing more until the client goes away."""


@dataclass(frozen=True)
class Fail:
    """Step of a script: end the call with a status."""

    code: grpc.StatusCode
    details: str


Step = GenerateResponse | Hang | Fail
Script = Sequence[Step]


class FakeGateway(GenerationServiceServicer, ModelServiceServicer):
    """A gateway on a free port of 127.0.0.1; use it as an async context manager."""

    def __init__(self, model: Model = MODEL) -> None:
        self.model = model
        self.scripts: deque[Script] = deque()
        self.requests: list[GenerateRequest] = []
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.address = ""
        self._unexpected: list[str] = []
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_GenerationServiceServicer_to_server(self, self._server)
        add_ModelServiceServicer_to_server(self, self._server)
        self.gate = FakeGateService()
        add_GateServiceServicer_to_server(self.gate, self._server)

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop(None)
        if kind is None:
            assert not self._unexpected, self._unexpected
            assert not self.scripts, f"{len(self.scripts)} scripts were never asked for"

    async def stop(self) -> None:
        """Go away in the middle of whatever runs."""
        await self._server.stop(None)

    async def GetModel(  # noqa: N802 the name is the proto's
        self, request: GetModelRequest, context: grpc.aio.ServicerContext
    ) -> GetModelResponse:
        return GetModelResponse(model=self.model)

    async def Generate(  # noqa: N802 the name is the proto's
        self, request: GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.asked.set()
        await self._check(request, context)
        if not self.scripts:
            self._unexpected.append(f"no script for {request}")
            await context.abort(grpc.StatusCode.INTERNAL, "no script")
        try:
            for step in self.scripts.popleft():
                match step:
                    case Hang():
                        await asyncio.Event().wait()
                    case Fail():
                        await context.abort(step.code, step.details)
                    case _:
                        yield _as_asked(step, request)
        except (asyncio.CancelledError, GeneratorExit):
            # Cancelled while it waits, or while the server writes what it yielded.
            self.cancelled.set()
            raise

    async def _check(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        prompts = [request.HasField("prompt"), bool(request.messages), bool(request.input_ids)]
        fault = ""
        if sum(prompts) != 1:
            fault = "prompt: exactly one of prompt, messages, input_ids"
        elif any(m.role not in ("system", "user", "assistant") for m in request.messages):
            fault = "messages: unknown role"
        elif context.time_remaining() is None:
            fault = "no deadline"
        if fault:
            self._unexpected.append(fault)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)


def started(prompt: int = 10) -> GenerateResponse:
    return GenerateResponse(
        started=GenerationStarted(request_id="r", model="fake", prompt_tokens=prompt)
    )


def target(text: str) -> GenerateResponse:
    """One token of the target's own, without speculation."""
    chunk = TokenChunk(text=text, gate_reason=GATE_REASON_FIXED, batch_rows=1)
    chunk.tokens.add(id=1, text=text, source=TOKEN_SOURCE_TARGET)
    return GenerateResponse(tokens=chunk)


def emitted(text: str, tokens: int) -> GenerateResponse:
    """A chunk of so many tokens of the target's own; the last one completes all the text."""
    chunk = target(text)
    for _ in range(tokens - 1):
        chunk.tokens.tokens.insert(0, Token(id=1, text="", source=TOKEN_SOURCE_TARGET))
    return chunk


def verified(accepted: Sequence[str], rejected: Sequence[str], own: str) -> GenerateResponse:
    """One verify step: accepted drafts, rejected ones, then the target's own token."""
    chunk = TokenChunk(text="".join(accepted) + own, gate_reason=GATE_REASON_FIXED, batch_rows=1)
    for text in accepted:
        chunk.tokens.add(id=1, text=text, source=TOKEN_SOURCE_DRAFT)
    chunk.tokens.add(id=1, text=own, source=TOKEN_SOURCE_TARGET)
    step = VerifyStep(
        drafted=len(accepted) + len(rejected),
        accepted=len(accepted),
        draft_source=DRAFT_SOURCE_NGRAM,
    )
    for text in (*accepted, *rejected):
        step.drafts.add(id=1, text=text)
    chunk.verify_steps.append(step)
    return GenerateResponse(tokens=chunk)


def finished(
    *,
    steps: int = 0,
    drafted: int = 0,
    accepted: int = 0,
    reason: FinishReason = FINISH_REASON_EOS,
) -> GenerateResponse:
    counts = Speculation(verify_steps=steps, drafted_tokens=drafted, accepted_tokens=accepted)
    if drafted:
        counts.acceptance_rate = accepted / drafted
    if steps:
        counts.mean_acceptance_length = 1 + accepted / steps
    return GenerateResponse(finished=GenerationFinished(finish_reason=reason, speculation=counts))


def _as_asked(event: GenerateResponse, request: GenerateRequest) -> GenerateResponse:
    """`event` without what the request did not ask for."""
    copy = GenerateResponse()
    copy.CopyFrom(event)
    if not request.return_token_text:
        for token in copy.tokens.tokens if copy.HasField("tokens") else ():
            token.ClearField("text")
    if not request.return_drafts:
        for step in copy.tokens.verify_steps if copy.HasField("tokens") else ():
            step.ClearField("drafts")
    return copy
