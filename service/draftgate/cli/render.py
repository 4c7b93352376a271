"""What goes to the terminal: streamed text, coloured by where its tokens came from.

A model's text is untrusted: control characters in it could move the cursor, retitle the window or
answer the terminal's own queries. On a terminal they are taken out; in a pipe text stays exact.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from typing import TextIO

import typer

from draftgate._pb.draftgate.v1.generation_pb2 import (
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_TARGET,
    TokenChunk,
)
from draftgate.errors import DraftgateError, ErrorCode

__all__ = [
    "Kind",
    "LogFormatter",
    "Origins",
    "ReaderGoneError",
    "Renderer",
    "clean",
    "colour_wanted",
    "print_error",
    "print_note",
    "say",
    "write_lines",
    "writing",
]

# C0 without tab and newline, DEL, C1. Without ESC and CSI the rest of a sequence is only text.
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROL[ord("\n")], _CONTROL[ord("\t")]


class ReaderGoneError(Exception):
    """Whoever read our standard output has closed it."""


class Kind(Enum):
    """Where a piece of shown text came from."""

    PLAIN = "plain"
    ACCEPTED = "accepted draft"
    REJECTED = "rejected draft"
    TARGET = "the target's own"


class LogFormatter(logging.Formatter):
    """Log records for a terminal: what they quote is as untrusted as a model's text.

    They begin with the time, in UTC like that of JSON lines; behind it what is no trouble looks
    like all else that the command says. The number in `worker`, if a record has one, tells
    processes that write to the same terminal apart.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        worker = getattr(record, "worker", None)
        origin = "" if worker is None else f"worker {worker}: "
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        time = moment.replace("+00:00", "Z")
        if record.levelno == logging.INFO:
            return clean(f"{time} draftgate: {origin}{record.getMessage()}")
        return clean(f"{time} {origin}{super().format(record)}")


class Origins:
    """Cuts the text of a generation, chunk by chunk, where its origin changes token by token.

    Text that may yet become a stop string comes later than its tokens: their pieces wait for it.
    """

    def __init__(self, *, show_rejected: bool) -> None:
        self._show_rejected = show_rejected
        self._waiting: list[tuple[str, Kind]] = []

    def pieces(self, chunk: TokenChunk) -> list[tuple[str, Kind]]:
        """The text of `chunk` in pieces.

        Rejected drafts stand where they were rejected: after the accepted drafts of their verify
        step, before the target's token. Leaving them out, the pieces always join to `chunk.text`:
        where the server's token texts do not (it has no tokenizer, say), the text stays in one
        plain piece.
        """
        told = [*self._waiting, *_cut(chunk, show_rejected=self._show_rejected)]
        if not _text(told).startswith(chunk.text):
            self._waiting = []
            return [(chunk.text, Kind.PLAIN)]
        found, self._waiting = _split(told, len(chunk.text))
        return found

    def forget(self) -> None:
        """Another generation follows."""
        self._waiting = []


class Renderer:
    """Writes the chunks of a generation to `out` as they come; behind its `end` those of another
    may follow."""

    def __init__(
        self, out: TextIO, *, show_speculation: bool = False, show_rejected: bool = False
    ) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._colour = (show_speculation or show_rejected) and colour_wanted(out)
        self._origins = Origins(show_rejected=show_rejected)
        self._at_line_start = True

    def write(self, chunk: TokenChunk) -> None:
        """Write the new text of `chunk`. Raises ReaderGoneError when `out` is a closed pipe."""
        if self._colour:
            for text, kind in self._origins.pieces(chunk):
                self._emit(_paint(clean(text), kind))
            self._written(chunk.text)
        else:
            self._plain(chunk.text)

    def prompt(self, text: str) -> None:
        """Write the prompt, which the text goes on."""
        self._plain(text, dim=True)

    def heading(self, text: str) -> None:
        """Write a line of our own before what follows."""
        self.end()
        self._plain(f"--- {text} ---\n", dim=True)

    def end(self) -> None:
        """End the last line."""
        self._origins.forget()
        if not self._at_line_start:
            self._plain("\n")

    def _plain(self, text: str, *, dim: bool = False) -> None:
        shown = clean(text) if self._terminal else text
        self._emit(typer.style(shown, dim=True) if dim and colour_wanted(self._out) else shown)
        self._written(text)

    def _written(self, text: str) -> None:
        if text:
            self._at_line_start = text.endswith("\n")
        self._flush()

    def _emit(self, text: str) -> None:
        with writing(self._out, "the answer"):
            self._out.write(text)

    def _flush(self) -> None:
        with writing(self._out, "the answer"):
            self._out.flush()


def write_lines(out: TextIO, *lines: str) -> None:
    """Lines on `out`, there at once. Raises ReaderGoneError when `out` is a closed pipe."""
    with writing(out, "the output"):
        out.write("".join(f"{line}\n" for line in lines))
        out.flush()


@contextmanager
def writing(out: TextIO, what: str) -> Iterator[None]:
    """Tells the failures of writing `what` to `out` apart.

    Raises ReaderGoneError when it is a closed pipe, DraftgateError for any other.
    """
    try:
        yield
    except BrokenPipeError as error:
        discard(out)
        raise ReaderGoneError from error
    except OSError as error:
        discard(out)
        raise DraftgateError(
            ErrorCode.INTERNAL, f"{what} cannot be written: {error.strerror}"
        ) from error


def discard(out: TextIO) -> None:
    """Let what is still to be written to `out` go nowhere: Python flushes it on its way out, and
    would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def clean(text: str) -> str:
    """`text` without control characters other than tab and newline."""
    return text.translate(_CONTROL)


def colour_wanted(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_error(message: str) -> None:
    """One red line on stderr."""
    line = f"error: {' '.join(clean(message).split())}"
    print(typer.style(line, fg="red") if colour_wanted(sys.stderr) else line, file=sys.stderr)


def say(message: str) -> None:
    """One line of a service. When the terminal is gone, it still has to end well."""
    with suppress(OSError):
        print(f"draftgate: {message}", flush=True)


def print_note(message: str) -> None:
    """One dim line on stderr, so that a pipe gets only text."""
    line = clean(message)
    print(typer.style(line, dim=True) if colour_wanted(sys.stderr) else line, file=sys.stderr)


def _cut(chunk: TokenChunk, *, show_rejected: bool) -> list[tuple[str, Kind]]:
    """A piece for each token, and for each rejected draft if those are shown."""
    cut: list[tuple[str, Kind]] = []
    tokens = list(chunk.tokens)
    for step in chunk.verify_steps if show_rejected else ():
        accepted = tokens[: step.accepted]
        del tokens[: step.accepted]
        cut += [(token.text, _kind(token.source)) for token in accepted]
        cut += [(draft.text, Kind.REJECTED) for draft in step.drafts[step.accepted :]]
        if tokens and tokens[0].source == TOKEN_SOURCE_TARGET:
            token = tokens.pop(0)
            cut.append((token.text, Kind.TARGET))
    cut += [(token.text, _kind(token.source)) for token in tokens]
    return cut


def _text(cut: list[tuple[str, Kind]]) -> str:
    return "".join(text for text, kind in cut if kind is not Kind.REJECTED)


def _split(
    cut: list[tuple[str, Kind]], length: int
) -> tuple[list[tuple[str, Kind]], list[tuple[str, Kind]]]:
    """The pieces with the first `length` characters of the text, and those of the rest."""
    for index, (text, kind) in enumerate(cut):
        if kind is Kind.REJECTED:
            continue
        if len(text) > length:
            before, rest = text[:length], text[length:]
            done = [*cut[:index], *([(before, kind)] if before else [])]
            return done, [(rest, kind), *cut[index + 1 :]]
        length -= len(text)
    return cut, []


def _kind(source: int) -> Kind:
    if source == TOKEN_SOURCE_DRAFT:
        return Kind.ACCEPTED
    return Kind.TARGET if source == TOKEN_SOURCE_TARGET else Kind.PLAIN


def _paint(text: str, kind: Kind) -> str:
    if not text or kind is Kind.PLAIN:
        return text
    if kind is Kind.ACCEPTED:
        return typer.style(text, fg="green")
    if kind is Kind.TARGET:
        return typer.style(text, fg="yellow")
    # A struck-out line break would break the line and show nothing.
    shown = text.replace("\n", "↵").replace("\t", "→")
    return typer.style(shown, fg="red", strikethrough=True)
