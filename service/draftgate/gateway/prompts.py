"""Prompts between text and ids, with the gateway's own tokenizer.

Long ones are worked on in a thread: meanwhile the event loop serves the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from draftgate.upstream.types import ChatPrompt, Prompt, TextPrompt

__all__ = ["ids_text", "prompt_ids", "prompt_text"]

_INLINE_LENGTH = 2048
"""Characters or ids that take less time than a thread costs."""

T = TypeVar("T")


async def prompt_ids(tokenizer: Tokenizer, prompt: TextPrompt | ChatPrompt) -> list[int]:
    """The ids that the prompt becomes.

    Raises DraftgateError(INVALID_ARGUMENT) if the chat template refuses the messages.
    """
    if isinstance(prompt, TextPrompt):
        return await _off_loop(len(prompt.text), lambda: tokenizer.encode_prompt(prompt.text))
    return await _off_loop(_length(prompt), lambda: tokenizer.encode_chat(prompt.messages))


async def prompt_text(tokenizer: Tokenizer | None, prompt: Prompt, resume_len: int) -> str:
    """The prompt's own text: of ids that of those before the `resume_len` last.

    Raises as `prompt_ids`, and DraftgateError(FAILED_PRECONDITION) without a tokenizer, which only
    a raw prompt can do without.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if tokenizer is None:
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "this server has no tokenizer")
    if isinstance(prompt, ChatPrompt):
        return await _off_loop(_length(prompt), lambda: tokenizer.render_chat(prompt.messages))
    return await ids_text(tokenizer, prompt.ids[: len(prompt.ids) - resume_len])


async def ids_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids."""
    return await _off_loop(len(ids), lambda: tokenizer.decode(ids))


def _length(prompt: ChatPrompt) -> int:
    return sum(len(message.content) for message in prompt.messages)


async def _off_loop(length: int, work: Callable[[], T]) -> T:
    return work() if length <= _INLINE_LENGTH else await asyncio.to_thread(work)
