"""Prompts made ids in this process.

Long ones are worked on in a thread: meanwhile the event loop serves the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from draftgate.text import Tokenizer
from draftgate.upstream.types import ChatPrompt, TextPrompt

__all__ = ["chat_length", "off_loop", "prompt_ids"]

_INLINE_LENGTH = 2048
"""Characters or ids that take less time than a thread costs."""

T = TypeVar("T")


async def prompt_ids(tokenizer: Tokenizer, prompt: TextPrompt | ChatPrompt) -> list[int]:
    """The ids that the prompt becomes.

    Raises DraftgateError(INVALID_ARGUMENT) if the chat template refuses the messages.
    """
    if isinstance(prompt, TextPrompt):
        return await off_loop(len(prompt.text), lambda: tokenizer.encode_prompt(prompt.text))
    return await off_loop(chat_length(prompt), lambda: tokenizer.encode_chat(prompt.messages))


def chat_length(prompt: ChatPrompt) -> int:
    """Characters of all messages."""
    return sum(len(message.content) for message in prompt.messages)


async def off_loop(length: int, work: Callable[[], T]) -> T:
    """What `work` on so many characters or ids returns, in a thread if that pays."""
    return work() if length <= _INLINE_LENGTH else await asyncio.to_thread(work)
