"""`draftgate chat`: a conversation on a terminal, or line by line from a pipe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest
from draftgate.cli import options
from draftgate.cli.answer import Answer
from draftgate.cli.client import GatewayClient
from draftgate.cli.conversation import Conversation
from draftgate.cli.render import Renderer, print_error, print_note
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["chat"]

_HELP = """\
/system TEXT   set the system message; without TEXT, remove it
/clear         forget the conversation
/help          show this
/quit          leave; so does Ctrl-D
Ctrl-C while an answer comes stops that answer."""

_CONNECT_TIMEOUT_S = 10.0


def chat(
    server: options.Server = options.DEFAULT_SERVER,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    timeout: options.Timeout = 300.0,
    max_draft_len: options.MaxDraftLen = None,
    show_speculation: options.ShowSpeculation = False,
    show_rejected: options.ShowRejected = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    verification: options.Verification = None,
) -> None:
    """Talk with the model over several turns.

    On a terminal /help lists the commands. In a pipe every line is one message.
    """
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
    )
    with asyncio.Runner() as runner:
        client = runner.run(_open(server))
        try:
            _Chat(
                runner=runner,
                client=client,
                request=request,
                timeout_s=timeout,
                show_speculation=show_speculation,
                show_rejected=show_rejected,
                conversation=runner.run(_conversation(client, system, max_tokens)),
                interactive=sys.stdin.isatty() and sys.stdout.isatty(),
            ).loop()
        finally:
            runner.run(client.close())


@dataclass(frozen=True)
class _Chat:
    """One chat. The loop is plain code: reading a line blocks, and only answers are asynchronous,
    so Ctrl-C reaches whichever of the two is running and nothing else."""

    runner: asyncio.Runner
    client: GatewayClient
    request: GenerateRequest
    timeout_s: float
    show_speculation: bool
    show_rejected: bool
    conversation: Conversation
    interactive: bool

    def loop(self) -> None:
        """Ask and answer until the input ends."""
        read_line = _terminal_reader(self.runner) if self.interactive else _pipe_line
        going_on = True
        while going_on:
            try:
                going_on = self._take(read_line().strip())
            except EOFError:
                return
            except KeyboardInterrupt:
                # At a terminal Ctrl-C takes back the line, as in a shell.
                if not self.interactive:
                    raise

    def _take(self, text: str) -> bool:
        """Carry out one line; false ends the chat."""
        if text.startswith("/"):
            return self._command(text)
        if text:
            self._turn(text)
        return True

    def _command(self, text: str) -> bool:
        """Carry out a slash command; false ends the chat."""
        name, _, argument = text.partition(" ")
        match name:
            case "/quit":
                return False
            case "/help":
                print_note(_HELP)
            case "/clear":
                self.conversation.clear()
                print_note("The conversation is forgotten.")
            case "/system":
                self.conversation.system = argument.strip() or None
                print_note("System message " + ("set." if argument.strip() else "removed."))
            case _:
                print_note(f"{name} is no command; /help lists them.")
        return True

    def _turn(self, text: str) -> None:
        dropped = self.conversation.make_room(text)
        if dropped:
            oldest = "oldest turn is" if dropped == 1 else f"{dropped} oldest turns are"
            print_note(f"To stay within the model's context, the {oldest} dropped.")
        request = GenerateRequest(messages=self.conversation.messages(text))
        request.MergeFrom(self.request)
        answer = Answer(
            Renderer(
                sys.stdout,
                show_speculation=self.show_speculation,
                show_rejected=self.show_rejected,
            )
        )
        try:
            self.runner.run(answer.follow(self.client.generate(request, timeout_s=self.timeout_s)))
        except KeyboardInterrupt:
            print_note("Stopped.")
        except DraftgateError as error:
            # In a pipe the next line may build on this answer; at a terminal the user decides.
            if not self.interactive:
                raise
            print_error(error.message)
        if answer.finished is not None:
            print_note(answer.summary())
        if answer.text:
            self.conversation.add(text, answer.text, answer.total_tokens)


async def _open(server: str) -> GatewayClient:
    # A channel belongs to the event loop that runs when it is made.
    return GatewayClient(server)


async def _conversation(
    client: GatewayClient, system: str | None, max_tokens: int | None
) -> Conversation:
    model = await client.model(timeout_s=_CONNECT_TIMEOUT_S)
    if not model.has_chat_template:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"{model.name} has no chat template: use `draftgate generate --raw`",
        )
    return Conversation(
        context_tokens=model.max_sequence_tokens,
        answer_tokens=max_tokens or model.max_sequence_tokens // 4,
        system=system,
    )


def _terminal_reader(runner: asyncio.Runner) -> Callable[[], str]:
    # Only an interactive chat needs it, and it takes a while to import.
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    print_note("Ctrl-D leaves, /help lists the commands.")

    return lambda: runner.run(session.prompt_async())


def _pipe_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
