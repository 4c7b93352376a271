"""The one place where a generation request is checked, field by field.

Messages name the field as the caller wrote it. Prompts are never shown.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.gateway.admission import Priority
from draftgate.gateway.admission.asking import prompt_size
from draftgate.gateway.config import GatewayConfig
from draftgate.sampling import SamplingParams, check_token_ids
from draftgate.text import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, ROLES, Message
from draftgate.upstream.types import (
    ChatPrompt,
    EngineDescription,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)

__all__ = [
    "GenerationCall",
    "GenerationInput",
    "check_generation",
    "check_id",
    "check_model_name",
    "check_tokenize",
    "default_sampling",
]

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True)
class GenerationInput:
    """A generation as the caller asked for it, not checked yet."""

    model: str
    request_id: str
    prompt: str | None
    messages: tuple[Message, ...]
    input_ids: tuple[int, ...]
    resume_len: int | None
    max_tokens: int | None
    sampling: Mapping[str, Any]
    """The fields of SamplingParams that were given, but for the one above. For the others the
    server has its defaults."""
    return_token_text: bool
    stop: tuple[str, ...] = ()
    n: int | None = None
    echo: bool = False
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True)
class GenerationCall:
    """A generation that may run."""

    request: GenerationRequest
    return_token_text: bool
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    n: int = 1
    """How many choices to run."""
    index: int = 0
    """Which of them this is, once they are told apart."""
    echo: bool = False
    """Whether to return the prompt's text."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's."""
    priority: Priority = Priority.INTERACTIVE


def check_model_name(field: str, name: str, config: GatewayConfig) -> None:
    """Raises DraftgateError(NOT_FOUND) for a model that is not served."""
    if name not in ("", config.model_name):
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise DraftgateError(
            ErrorCode.NOT_FOUND,
            f"{field}: no model {shown!r} here, {config.model_name!r} is served",
            field=field,
        )


def check_generation(
    given: GenerationInput,
    config: GatewayConfig,
    engine: EngineDescription,
    *,
    deadline_ms: int | None,
) -> GenerationCall:
    """The call to run.

    Raises DraftgateError(INVALID_ARGUMENT or NOT_FOUND) naming the first field at fault.
    """
    check_model_name("model", given.model, config)
    prompt = _checked_prompt(given, config, engine)
    max_tokens = _checked_max_tokens(given, config, engine)
    defaults = default_sampling(config, engine)
    sampling = replace(defaults, **given.sampling, max_tokens=max_tokens)
    if sampling.max_draft_len is not None and sampling.max_draft_len < 0:
        raise invalid_argument("max_draft_len", sampling.max_draft_len, "an integer from 0")
    sampling.validate(vocab_size=engine.vocab_limit, prefix="sampling.")
    if given.return_token_text and config.tokenizer_dir is None:
        raise invalid_argument("return_token_text", True, "false: this server has no tokenizer")
    _check_stop(given.stop)
    if given.echo and given.prompt is None and config.tokenizer_dir is None:
        raise invalid_argument("echo", True, "false without prompt: this server has no tokenizer")
    request = GenerationRequest(
        request_id=_checked_request_id(given.request_id),
        prompt=prompt,
        sampling=sampling,
        resume_len=_checked_resume_len(given, max_tokens),
        deadline_ms=deadline_ms,
        at_once=bool(given.stop),
    )
    _check_prompt_tokens(request, config)
    return GenerationCall(
        request,
        given.return_token_text,
        stop=given.stop,
        n=_checked_n(given.n, config),
        echo=given.echo,
        eos_token_ids=engine.eos_token_ids,
        priority=given.priority,
    )


def default_sampling(config: GatewayConfig, engine: EngineDescription) -> SamplingParams:
    """What a generation gets that asks for nothing."""
    sampling = config.defaults.sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, _output_limit(config, engine)))


def check_tokenize(
    model: str,
    prompt: str | None,
    messages: tuple[Message, ...],
    config: GatewayConfig,
    *,
    has_chat_template: bool,
) -> TextPrompt | ChatPrompt:
    """The prompt to tokenise.

    Raises DraftgateError(INVALID_ARGUMENT or NOT_FOUND) naming the first field at fault.
    """
    check_model_name("model", model, config)
    if (prompt is not None) == bool(messages):
        found = "prompt and messages" if messages else "none of them"
        raise invalid_argument(
            "messages" if messages else "prompt", found, "exactly one of prompt and messages"
        )
    if prompt is not None:
        return _checked_text_prompt(prompt, config)
    _check_messages(messages, config, has_chat_template=has_chat_template)
    return ChatPrompt(messages)


def check_id(field: str, given: str) -> None:
    """Raises DraftgateError(INVALID_ARGUMENT) for what cannot be an id."""
    if not _ID.fullmatch(given):
        raise invalid_argument(
            field, given, "1 to 128 letters, digits, dots, colons, dashes, underscores"
        )


def _checked_request_id(request_id: str) -> str:
    if not request_id:
        return secrets.token_hex(16)
    check_id("request_id", request_id)
    return request_id


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid_argument("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for index, each in enumerate(stop):
        length_bytes = len(each.encode())
        if not 1 <= length_bytes <= MAX_STOP_STRING_BYTES:
            raise invalid_argument(
                f"stop[{index}]",
                f"{length_bytes} bytes",
                f"1 to {MAX_STOP_STRING_BYTES} bytes of UTF-8",
            )


def _checked_n(n: int | None, config: GatewayConfig) -> int:
    if n is None:
        return 1
    if not 1 <= n <= config.max_choices:
        raise invalid_argument("n", n, f"an integer from 1 to {config.max_choices}")
    return n


def _checked_prompt(
    given: GenerationInput, config: GatewayConfig, engine: EngineDescription
) -> Prompt:
    found = [
        name
        for name, present in (
            ("prompt", given.prompt is not None),
            ("messages", bool(given.messages)),
            ("input_ids", bool(given.input_ids)),
        )
        if present
    ]
    if len(found) != 1:
        raise invalid_argument(
            found[1] if found else "prompt",
            " and ".join(found) if found else "none of them",
            "exactly one of prompt, messages and input_ids",
        )
    if given.prompt is not None:
        return _checked_text_prompt(given.prompt, config)
    if given.messages:
        if engine.lacks_tokenizer:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                "messages: the models behind this gateway have no chat template, and it was "
                "started without the folder of the model's tokenizer, which has one",
                field="messages",
            )
        _check_messages(given.messages, config, has_chat_template=engine.has_chat_template)
        return ChatPrompt(given.messages)
    longest = engine.sequence_limit - 1
    if len(given.input_ids) > longest:
        raise invalid_argument(
            "input_ids", f"{len(given.input_ids)} ids", f"at most {longest}: one has to be emitted"
        )
    check_token_ids("input_ids", given.input_ids, engine.vocab_limit)
    return TokenPrompt(given.input_ids)


def _checked_text_prompt(prompt: str, config: GatewayConfig) -> TextPrompt:
    _check_text("prompt", prompt)
    _check_length("prompt", len(prompt.encode()), config)
    return TextPrompt(prompt)


def _check_messages(
    messages: tuple[Message, ...], config: GatewayConfig, *, has_chat_template: bool
) -> None:
    if not has_chat_template:
        raise invalid_argument(
            "messages",
            f"{len(messages)} messages",
            "none: the model has no chat template",
        )
    if len(messages) > config.max_messages:
        raise invalid_argument(
            "messages", f"{len(messages)} messages", f"at most {config.max_messages}"
        )
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid_argument(f"messages[{index}].role", message.role, ", ".join(ROLES))
        _check_text(f"messages[{index}].content", message.content)
    _check_length("messages", sum(len(each.content.encode()) for each in messages), config)


def _check_text(field: str, text: str) -> None:
    if not text:
        raise invalid_argument(field, text, "text that is not empty")


def _check_length(field: str, length_bytes: int, config: GatewayConfig) -> None:
    if length_bytes > config.max_prompt_bytes:
        raise invalid_argument(
            field, f"{length_bytes} bytes", f"at most {config.max_prompt_bytes} bytes of UTF-8"
        )


def _checked_max_tokens(
    given: GenerationInput, config: GatewayConfig, engine: EngineDescription
) -> int:
    limit = _output_limit(config, engine)
    if given.max_tokens is None:
        return default_sampling(config, engine).max_tokens
    if not 1 <= given.max_tokens <= limit:
        raise invalid_argument("max_tokens", given.max_tokens, f"an integer from 1 to {limit}")
    return given.max_tokens


def _output_limit(config: GatewayConfig, engine: EngineDescription) -> int:
    """The largest `max_tokens` that a request may give."""
    return min(engine.sequence_limit, config.max_output_tokens or engine.sequence_limit)


def _check_prompt_tokens(request: GenerationRequest, config: GatewayConfig) -> None:
    if config.max_prompt_tokens is None:
        return
    field, size = prompt_size(request.prompt)
    tokens = size - request.resume_len  # Those are output.
    if tokens > config.max_prompt_tokens:
        allowed = f"at most {config.max_prompt_tokens} tokens"
        raise invalid_argument(field, f"{tokens} tokens", allowed)


def _checked_resume_len(given: GenerationInput, max_tokens: int) -> int:
    if given.resume_len is None:
        return 0
    # A token of the prompt must remain. What was emitted before counts towards max_tokens, of which
    # one at least must be left.
    longest = max(0, min(len(given.input_ids), max_tokens) - 1)
    if not 0 <= given.resume_len <= longest:
        raise invalid_argument(
            "resume_len",
            given.resume_len,
            f"an integer from 0 to {longest}: fewer than the ids given and max_tokens",
        )
    return given.resume_len
