"""The text of prompts and ids, with the gateway's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from draftgate.upstream.encoding import chat_length, off_loop
from draftgate.upstream.types import ChatPrompt, Prompt, TextPrompt

__all__ = ["ids_text", "prompt_text"]


async def prompt_text(tokenizer: Tokenizer | None, prompt: Prompt, resume_len: int) -> str:
    """The prompt's own text: of ids that of those before the `resume_len` last.

    Raises DraftgateError: INVALID_ARGUMENT if the chat template refuses the messages,
    FAILED_PRECONDITION without a tokenizer, which only a raw prompt can do without.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if tokenizer is None:
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "this server has no tokenizer")
    if isinstance(prompt, ChatPrompt):
        return await off_loop(chat_length(prompt), lambda: tokenizer.render_chat(prompt.messages))
    return await ids_text(tokenizer, prompt.ids[: len(prompt.ids) - resume_len])


async def ids_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids."""
    return await off_loop(len(ids), lambda: tokenizer.decode(ids))
