"""Command-line options shared by the commands that ask for text.

Only types are checked here. Ranges are the gateway's to check: it names the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from google.protobuf.message import Message

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest
from draftgate._pb.draftgate.v1.generation_pb2 import Priority as _PbPriority
from draftgate._pb.draftgate.v1.generation_pb2 import Verification as _PbVerification
from draftgate.client.types import Priority as _Priority
from draftgate.sampling import Verification as _Verification

__all__ = [
    "DEFAULT_SERVER",
    "Choices",
    "Echo",
    "FrequencyPenalty",
    "IgnoreEos",
    "MaxDraftLen",
    "MaxTokens",
    "MinP",
    "PresencePenalty",
    "Priority",
    "RepetitionPenalty",
    "Seed",
    "Server",
    "ShowRejected",
    "ShowSpeculation",
    "Stop",
    "StopToken",
    "System",
    "Temperature",
    "Timeout",
    "TopK",
    "TopP",
    "Verification",
    "new_request",
]

DEFAULT_SERVER = "127.0.0.1:50051"

_SAMPLING = "Sampling"
_SHOWING = "What is shown"

Server = Annotated[
    str, typer.Option(envvar="DRAFTGATE_SERVER", metavar="HOST:PORT", help="The gateway to ask.")
]
System = Annotated[
    str | None, typer.Option(help="System message put before the conversation.", show_default=False)
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of one answer.", show_default="the server's")
]
Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Give up an answer after this long.")
]
MaxDraftLen = Annotated[
    int | None,
    typer.Option(
        help="Draft at most this many tokens a step; 0 never speculates.",
        show_default="the server's",
    ),
]
ShowSpeculation = Annotated[
    bool,
    typer.Option(
        "--show-speculation",
        rich_help_panel=_SHOWING,
        help="Colour each token: accepted draft green, the target's own amber.",
    ),
]
ShowRejected = Annotated[
    bool,
    typer.Option(
        "--show-rejected",
        rich_help_panel=_SHOWING,
        help="Also show rejected drafts, red and struck out.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(rich_help_panel=_SAMPLING, help="0 is greedy.", show_default="the server's"),
]
TopP = Annotated[
    float | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Keep the most likely tokens up to this mass."),
]
TopK = Annotated[
    int | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Keep this many most likely tokens; 0 all."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=_SAMPLING, help="Drop tokens below this share of the most likely."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Above 1 discourages tokens seen before."),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Taken from the logit of tokens in the answer."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(rich_help_panel=_SAMPLING, help="The same, once per earlier occurrence."),
]
Seed = Annotated[
    int | None,
    typer.Option(rich_help_panel=_SAMPLING, help="Same seed, same prompt: same answer."),
]
Verification = Annotated[
    _Verification | None,
    typer.Option(
        rich_help_panel=_SAMPLING,
        help="How drafts are verified.",
        show_default="coupled with a seed, rejection without",
    ),
]
StopToken = Annotated[
    list[int] | None,
    typer.Option(
        rich_help_panel=_SAMPLING, metavar="ID", help="Token id that ends the answer; repeatable."
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", rich_help_panel=_SAMPLING, help="Go on past the model's end token."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text before which the answer ends; repeatable."),
]
Choices = Annotated[
    int | None,
    typer.Option("--n", metavar="N", help="Answers to generate side by side.", show_default="one"),
]
Echo = Annotated[
    bool,
    typer.Option(
        "--echo", rich_help_panel=_SHOWING, help="Put the prompt, as the model reads it, first."
    ),
]
Priority = Annotated[
    _Priority | None,
    typer.Option(help="Whom to keep waiting when the server is full.", show_default="interactive"),
]


def new_request(
    *,
    show_speculation: bool,
    show_rejected: bool,
    max_tokens: int | None,
    max_draft_len: int | None,
    verification: _Verification | None,
    stop: Sequence[str] | None = None,
    n: int | None = None,
    echo: bool = False,
    priority: _Priority | None = None,
    **sampling: float | int | bool | Sequence[int] | None,
) -> GenerateRequest:
    """A request for what the options say; the prompt is still to be set.

    `sampling` are the other fields of SamplingParameters; None leaves one to the server.
    Raises typer.BadParameter naming the option whose value its field cannot hold.
    """
    request = GenerateRequest(
        return_token_text=show_speculation or show_rejected, return_drafts=show_rejected, echo=echo
    )
    if not all(map(is_text, stop or ())):
        raise typer.BadParameter("it is not UTF-8", param_hint="--stop")
    request.stop.extend(stop or ())
    _fill(request, {"max_tokens": max_tokens, "max_draft_len": max_draft_len, "n": n})
    _fill(request.sampling, sampling)
    if verification is not None:
        request.sampling.verification = _PbVerification.Value(f"VERIFICATION_{verification.name}")
    if priority is not None:
        request.priority = _PbPriority.Value(f"PRIORITY_{priority.name}")
    return request


def _fill(
    message: Message, values: Mapping[str, float | int | bool | Sequence[int] | None]
) -> None:
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, Sequence):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except ValueError as error:
            option = name.removesuffix("_ids").replace("_", "-")
            raise typer.BadParameter(
                f"{value} is too large or too small", param_hint=f"--{option}"
            ) from error


def is_text(argument: str) -> bool:
    """Whether an argument was UTF-8: Python lets other bytes through as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)
