"""`draftgate generate`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest
from draftgate.cli import options
from draftgate.cli.choices import Choices
from draftgate.cli.client import GatewayClient
from draftgate.cli.render import Renderer, print_note

__all__ = ["generate"]


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or none reads standard input.")
    ] = None,
    server: options.Server = options.DEFAULT_SERVER,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as it stands, without a chat template."),
    ] = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    n: options.Choices = None,
    priority: options.Priority = None,
    timeout: options.Timeout = 300.0,
    max_draft_len: options.MaxDraftLen = None,
    show_speculation: options.ShowSpeculation = False,
    show_rejected: options.ShowRejected = False,
    echo: options.Echo = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    verification: options.Verification = None,
    stop_token: options.StopToken = None,
    ignore_eos: options.IgnoreEos = False,
) -> None:
    """Stream the answer to one prompt.

    The text goes to standard output, a closing line with counts to standard error. Several answers
    (--n) come one after the other, each below a line that says which it is.
    """
    if raw and system is not None:
        raise typer.BadParameter("--raw puts nothing before the prompt", param_hint="--system")
    text = _read_stdin(raw=raw) if prompt in (None, "-") else str(prompt)
    if not options.is_text(text):
        raise typer.BadParameter("it is not UTF-8", param_hint="PROMPT")
    if not text:
        raise typer.BadParameter("it is empty", param_hint="PROMPT")

    request = options.new_request(
        show_speculation=show_speculation,
        show_rejected=show_rejected,
        max_tokens=max_tokens,
        max_draft_len=max_draft_len,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        verification=verification,
        stop_token_ids=stop_token,
        ignore_eos=ignore_eos or None,
        stop=stop,
        n=n,
        echo=echo,
        priority=priority,
    )
    if raw:
        request.prompt = text
    else:
        if system is not None:
            request.messages.add(role="system", content=system)
        request.messages.add(role="user", content=text)
    renderer = Renderer(sys.stdout, show_speculation=show_speculation, show_rejected=show_rejected)
    # Ctrl-C cancels the coroutine, and with it the call on the server.
    asyncio.run(_stream(server, request, timeout, renderer))


async def _stream(
    server: str, request: GenerateRequest, timeout_s: float, renderer: Renderer
) -> None:
    choices = Choices(renderer, request.n if request.HasField("n") else 1)
    async with GatewayClient(server) as client:
        try:
            await choices.follow(client.generate(request, timeout_s=timeout_s))
        finally:
            for line in choices.summaries():
                print_note(line)


def _read_stdin(*, raw: bool) -> str:
    if sys.stdin.isatty():
        print_note("Type the prompt; Ctrl-D on an empty line ends it.")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"standard input is not UTF-8: {error}", param_hint="PROMPT"
        ) from error
    # The line break that ends a shell's `echo` is not part of the question.
    return text if raw else text.removesuffix("\n")
