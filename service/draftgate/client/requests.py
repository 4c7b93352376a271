"""From what a caller asks for to the public protobuf messages.

What a field cannot hold raises DraftgateError(INVALID_ARGUMENT), and what is of another type
TypeError. Ranges are the gateway's to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from draftgate._pb.draftgate.v1 import admin_pb2, gate_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.client.operations import GatePolicy, LogLevel
from draftgate.client.types import GenerationOptions, Message, Prompt
from draftgate.errors import invalid_argument

__all__ = ["chat_messages", "gate_policy", "generate_request", "log_level", "made"]

_Request = TypeVar("_Request", bound=ProtoMessage)

_SAMPLING = frozenset(pb.SamplingParameters.DESCRIPTOR.fields_by_name)
_OPTIONS = frozenset(GenerationOptions.__annotations__)


def generate_request(prompt: Prompt, options: GenerationOptions) -> pb.GenerateRequest:
    """A generation of `prompt`, which must not be empty."""
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(f"no such option of a generation: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = dict(options)
    if (verification := given.get("verification")) is not None:
        given["verification"] = pb.Verification.Value(f"VERIFICATION_{verification.name}")
    if (priority := given.get("priority")) is not None:
        given["priority"] = pb.Priority.Value(f"PRIORITY_{priority.name}")
    sampling = {name: given.pop(name) for name in _SAMPLING & given.keys()}
    request = made(pb.GenerateRequest(), **given)
    if sampling:
        made(request.sampling, path="sampling.", **sampling)
    if isinstance(prompt, str):
        return made(request, prompt=prompt)
    if not prompt:
        raise invalid_argument("prompt", prompt, "text, messages or token ids, at least one")
    if isinstance(prompt[0], Message):
        request.messages.extend(chat_messages(prompt))
        return request
    return made(request, input_ids=prompt)


def chat_messages(messages: Sequence[object]) -> list[pb.ChatMessage]:
    """A conversation of Messages."""
    found = []
    for index, each in enumerate(messages):
        if not isinstance(each, Message):
            raise TypeError(f"messages[{index}] is a {type(each).__name__}, not a Message")
        path = f"messages[{index}]."
        found.append(made(pb.ChatMessage(), path=path, role=each.role, content=each.content))
    return found


def gate_policy(policy: GatePolicy) -> gate_pb2.GatePolicy:
    """The whole policy."""
    return made(
        gate_pb2.GatePolicy(),
        path="policy.",
        mode=gate_pb2.GateMode.Value(f"GATE_MODE_{policy.mode.name}"),
        draft_len=policy.draft_len,
        max_draft_len=policy.max_draft_len,
        max_step_ms=policy.max_step_ms,
        max_tpot_ms=policy.max_tpot_ms,
    )


def log_level(level: LogLevel) -> admin_pb2.LogLevel.ValueType:
    """The level's number."""
    return admin_pb2.LogLevel.Value(f"LOG_LEVEL_{level.name}")


def made(request: _Request, *, path: str = "", **fields: Any) -> _Request:
    """`request` with these fields set; None leaves one alone, a sequence fills a repeated one.

    `path` is put before a field's name in errors.
    """
    for name, value in fields.items():
        if value is None:
            continue
        try:
            if request.DESCRIPTOR.fields_by_name[name].is_repeated:
                getattr(request, name).extend(value)
            else:
                setattr(request, name, value)
        except ValueError as error:  # Text that is not UTF-8 too.
            allowed = "what its type in the .proto file can hold"
            raise invalid_argument(path + name, value, allowed) from error
    return request
