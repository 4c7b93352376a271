"""What a validated generation asks for."""

from __future__ import annotations

from draftgate.gateway.admission.desk import Ask
from draftgate.gateway.admission.queue import Priority
from draftgate.gateway.tenant import Tenant
from draftgate.upstream.types import ChatPrompt, GenerationRequest, Prompt, TextPrompt

__all__ = ["ask_for", "prompt_size", "text_tokens"]

_BYTES_PER_TOKEN = 4
"""Of English text in UTF-8. Tokenising would cost more than refusing may; the true number is
charged when it is known."""
_TOKENS_PER_MESSAGE = 4
"""What a chat template puts around a message."""


def ask_for(request: GenerationRequest, tenant: Tenant, priority: Priority) -> Ask:
    """The request as admission sees it."""
    field, tokens = prompt_size(request.prompt)
    return Ask(
        tenant=tenant,
        priority=priority,
        prompt_tokens=tokens,
        prompt_field=field,
        max_tokens=request.sampling.max_tokens - request.resume_len,
        deadline_ms=request.deadline_ms,
        request_id=request.request_id,
    )


def text_tokens(size_bytes: int) -> int:
    """About how many tokens a text has that is so long in UTF-8."""
    return -(-size_bytes // _BYTES_PER_TOKEN)


def prompt_size(prompt: Prompt) -> tuple[str, int]:
    """The field that the prompt came in, and about how many tokens it has."""
    if isinstance(prompt, TextPrompt):
        return "prompt", text_tokens(len(prompt.text.encode()))
    if isinstance(prompt, ChatPrompt):
        sizes_bytes = [len(each.content.encode()) for each in prompt.messages]
        found = [text_tokens(each) + _TOKENS_PER_MESSAGE for each in sizes_bytes]
        return "messages", sum(found)
    return "input_ids", len(prompt.ids)
