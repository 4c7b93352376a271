"""Conversations in front of models that take text alone: put through the chat template here."""

from __future__ import annotations

from dataclasses import replace

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.upstream.encoding import chat_length, off_loop
from draftgate.upstream.profiles.wrapped import WrappedProfile
from draftgate.upstream.types import ChatPrompt, GenerationRequest, TextPrompt

__all__ = ["TemplatedProfile"]


class TemplatedProfile(WrappedProfile):
    """Another profile, with messages."""

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            messages = prompt.messages
            text = await off_loop(
                chat_length(prompt), lambda: self._tokenizer.chat_as_raw_prompt(messages)
            )
            request = replace(request, prompt=TextPrompt(text))
        return await self._inner.generation(request, wire_id)
