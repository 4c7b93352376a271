"""Conversations in front of models that take text alone: put through the chat template here."""

from __future__ import annotations

from dataclasses import replace

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.text import Tokenizer
from draftgate.upstream.encoding import chat_length, off_loop
from draftgate.upstream.profiles.base import Profile
from draftgate.upstream.profiles.wrapped import WrappedProfile
from draftgate.upstream.types import ChatPrompt, EngineDescription, GenerationRequest, TextPrompt

__all__ = ["TemplatedProfile"]


class TemplatedProfile(WrappedProfile):
    """Another profile, with messages."""

    def __init__(self, inner: Profile, tokenizer: Tokenizer) -> None:
        super().__init__(inner)
        self._tokenizer = tokenizer

    @property
    def description(self) -> EngineDescription | None:
        known = self._inner.description
        if known is None:
            return None
        has_template = self._tokenizer.has_chat_template
        return replace(known, has_chat_template=has_template, lacks_tokenizer=False)

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            messages = prompt.messages
            text = await off_loop(
                chat_length(prompt), lambda: self._tokenizer.chat_as_raw_prompt(messages)
            )
            request = replace(request, prompt=TextPrompt(text))
        return await self._inner.generation(request, wire_id)
