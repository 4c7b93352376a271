"""Text in front of models that take and give ids: tokenised and detokenised in this process.

The same code as in the Triton models `preprocessing` and `postprocessing`, which this saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Detokenizer, Tokenizer
from draftgate.upstream.encoding import prompt_ids
from draftgate.upstream.profiles.base import Reader
from draftgate.upstream.profiles.wrapped import WrappedProfile
from draftgate.upstream.responses import broken
from draftgate.upstream.types import (
    ChatPrompt,
    Chunk,
    EngineDescription,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
)

__all__ = ["TokenisedProfile"]


class TokenisedProfile(WrappedProfile):
    """Another profile, with text."""

    @property
    def description(self) -> EngineDescription | None:
        known = super().description
        return known and replace(known, vocab_size=self._tokenizer.vocab_size)

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        prompt = request.prompt
        if not isinstance(prompt, TokenPrompt):
            prompt = TokenPrompt(tuple(await self._encoded(prompt)))
        return await self._inner.generation(replace(request, prompt=prompt), wire_id)

    def reader(self, request: GenerationRequest) -> Reader:
        ids = request.prompt.ids if isinstance(request.prompt, TokenPrompt) else ()
        emitted = ids[len(ids) - request.resume_len :]
        return _TextReader(self._inner.reader(request), self._tokenizer, emitted)

    async def _encoded(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        ids = await prompt_ids(self._tokenizer, prompt)
        if not ids:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{prompt.tensor}: got an empty prompt, allowed: at least one token",
                field=prompt.tensor,
            )
        return ids


class _TextReader:
    def __init__(self, inner: Reader, tokenizer: Tokenizer, emitted: Sequence[int]) -> None:
        """`emitted` are the ids of an earlier run that this generation resumes."""
        self._inner = inner
        self._stream = Detokenizer(tokenizer)
        self._stream.push(emitted)
        self._next_index = 0

    def read(self, response: pb.ModelInferResponse) -> Chunk | None:
        return self._with_text(self._inner.read(response))

    def end(self) -> Chunk | None:
        return self._with_text(self._inner.end())

    def _with_text(self, chunk: Chunk | None) -> Chunk | None:
        if chunk is None:
            return None
        if chunk.index != self._next_index:
            raise broken(f"chunk {chunk.index} came where {self._next_index} was due")
        self._next_index += 1
        text = self._stream.push(chunk.token_ids)
        if chunk.finish_reason:
            text += self._stream.flush()
        return replace(chunk, text=text)
