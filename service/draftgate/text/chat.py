"""Chat messages: reading them from JSON and putting them through a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument

__all__ = ["ROLES", "ChatTemplate", "Message", "check_text", "parse_messages"]

ROLES = ("system", "user", "assistant")
_ALLOWED_ROLES = "system, user or assistant"
_MESSAGES_SHAPE = 'a JSON list of {"role": ..., "content": ...}'


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Who speaks: one of `ROLES`."""
    content: str
    """What was said."""


def parse_messages(text: str, *, field: str = "messages") -> list[Message]:
    """Read a JSON list of `{"role": ..., "content": ...}` with at least one message.

    Raises DraftgateError(INVALID_ARGUMENT) that names the part at fault, such as
    `messages[2].role`, and never repeats what a message says.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _invalid(field, f"invalid JSON at character {error.pos}", _MESSAGES_SHAPE) from error
    except RecursionError as error:
        raise _invalid(field, "JSON nested too deep", _MESSAGES_SHAPE) from error
    if not isinstance(found, list):
        raise _invalid(field, _kind(found), _MESSAGES_SHAPE)
    if not found:
        raise _invalid(field, "an empty list", "at least one message")
    return [_message(f"{field}[{index}]", item) for index, item in enumerate(found)]


def check_text(field: str, text: str) -> None:
    """Raise DraftgateError(INVALID_ARGUMENT) if `text` has no UTF-8 form (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _invalid(field, f"a lone surrogate at character {error.start}", "text") from error


class ChatTemplate:
    """A checkpoint's Jinja chat template, run in a sandbox.

    It sees what templates are written for: `messages`, `add_generation_prompt`, the special tokens'
    names, `raise_exception`, `strftime_now` and a `tojson` that leaves HTML characters alone.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) if the template does not parse."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION, f"chat template does not parse: {error}"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, field: str = "messages") -> str:
        """The prompt for the assistant's next turn.

        Raises DraftgateError(INVALID_ARGUMENT) if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[{"role": item.role, "content": item.content} for item in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{field}: refused by the model's chat template: {error}",
                field=field,
            ) from error
        except Exception as error:  # a template is a program and may do anything
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{field}: the model's chat template failed on them ({type(error).__name__})",
                field=field,
            ) from error


def load_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a Hugging Face folder: its `chat_template.jinja`, else the one in its
    `tokenizer_config.json`; None if it has neither.

    Raises DraftgateError(FAILED_PRECONDITION) for a template that cannot be used.
    """
    path = model_dir / "chat_template.jinja"
    source = path.read_text("utf-8") if path.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        # The form with several named templates; `default` is the one for plain chat.
        named = {item["name"]: item["template"] for item in source}
        source = named.get("default")
    if source is None:
        return None
    return ChatTemplate(source, _special_tokens(tokenizer_config))


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _message(field: str, item: object) -> Message:
    if not isinstance(item, dict):
        raise _invalid(field, _kind(item), 'an object {"role": ..., "content": ...}')
    for name in item:
        if name not in ("role", "content"):
            raise _invalid(field, f"an unknown key {name[:40]!r}", "the keys role and content")
    role = _string(field, item, "role")
    if role not in ROLES:
        raise invalid_argument(f"{field}.role", role, _ALLOWED_ROLES)
    content = _string(field, item, "content")
    check_text(f"{field}.content", content)
    return Message(role, content)


def _string(field: str, item: Mapping[str, object], name: str) -> str:
    allowed = _ALLOWED_ROLES if name == "role" else "text"
    if name not in item:
        raise _invalid(f"{field}.{name}", "nothing", allowed)
    value = item[name]
    if not isinstance(value, str):
        raise _invalid(f"{field}.{name}", _kind(value), allowed)
    return value


def _kind(value: object) -> str:
    """What a parsed JSON value is, in words that do not repeat it."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _invalid(field: str, got: str, allowed: str) -> DraftgateError:
    return DraftgateError(
        ErrorCode.INVALID_ARGUMENT, f"{field}: got {got}, allowed: {allowed}", field=field
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
