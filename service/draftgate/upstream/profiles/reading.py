"""What the readers of foreign models share: text made deltas, counts made totals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.totals import Totals
from draftgate.upstream.profiles.tensors import Answer, broken, is_final
from draftgate.upstream.types import Chunk, PromptReport

__all__ = ["ENDED", "PERFORMANCE_OUTPUTS", "Counts", "StreamReader", "TextDeltas"]

ENDED = "ended"
"""The finish reason of a generation whose engine says that it ended, and not why."""

PERFORMANCE_OUTPUTS = (
    "num_input_tokens",
    "num_output_tokens",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
"""The outputs beside text, ids and reasons that the readers understand."""

_UNFINISHED = "\ufffd"
"""What a tokenizer decodes half a character to."""


class TextDeltas:
    """What each response adds to the text."""

    def __init__(self, *, cumulative: bool) -> None:
        """cumulative: every response carries the whole text so far."""
        self._cumulative = cumulative
        self._whole = ""
        self._sent = ""

    def delta(self, text: str | None, *, last: bool) -> str:
        """The new text of a response. Of a cumulative one, characters that are not complete yet
        are held back until the last.

        Raises DraftgateError(INTERNAL) if text that was handed out already has changed.
        """
        if not self._cumulative:
            return text or ""
        if text is not None:
            self._whole = text
        stable = self._whole if last else self._whole.rstrip(_UNFINISHED)
        if not stable.startswith(self._sent):
            raise broken("it changed text that it had sent before")
        new = stable[len(self._sent) :]
        self._sent = stable
        return new


class Counts:
    """Usage and acceptance of one generation, from what its responses say.

    Acceptance that the engine reports is taken as it is; a report of no drafts is none, because
    releases are known that report zero whatever they drafted. Without a report, an engine known to
    speculate that tells the tokens of each of its steps lets it be derived: beyond the first
    response, which brings the token of the prompt, every token but one of a step was a draft.
    """

    def __init__(self, *, one_step_each: bool) -> None:
        """one_step_each: the engine speculates, and sends a response for every step."""
        self._one_step_each = one_step_each
        self._prompt_tokens: int | None = None
        self._output_tokens = 0
        self._all_told = True
        self._steps = 0
        self._first_tokens = 0
        self._reported: tuple[int, int] | None = None
        self.responses = 0
        """Those that brought something."""

    @property
    def output_tokens(self) -> int | None:
        return self._output_tokens if self._all_told and self.responses else None

    def take(self, answer: Answer, new_tokens: int | None) -> None:
        """Count one response with so many new tokens; None: it does not say."""
        if new_tokens is None:
            self._all_told = False
        elif new_tokens > 0:
            if not self._steps:
                self._first_tokens = new_tokens
            self._output_tokens += new_tokens
            self._steps += 1
        self.responses += 1
        prompt_tokens = answer.integer("num_input_tokens")
        if prompt_tokens is not None:
            self._prompt_tokens = prompt_tokens
        drafted = answer.integer("total_draft_tokens")
        accepted = answer.integer("total_accepted_draft_tokens")
        if drafted and accepted is not None and 0 <= accepted <= drafted:
            self._reported = drafted, accepted

    def totals(self) -> Totals:
        usage = Totals(prompt_tokens=self._prompt_tokens, output_tokens=self.output_tokens)
        if self._reported is not None:
            drafted, accepted = self._reported
            return replace(usage, drafted_tokens=drafted, accepted_tokens=accepted)
        if self._one_step_each and self._all_told and self._steps > 1:
            accepted = self._output_tokens - self._first_tokens - (self._steps - 1)
            return replace(
                usage, accepted_tokens=accepted, verify_steps=self._steps - 1, derived=True
            )
        return usage


class StreamReader(ABC):
    """Reads the responses to one request in the order in which they come."""

    def __init__(self, texts: TextDeltas, counts: Counts) -> None:
        self._texts = texts
        self._counts = counts
        self._index = 0

    def read(self, response: pb.ModelInferResponse) -> Chunk | None:
        final = is_final(response)
        if not response.outputs and not final:
            return None
        answer = Answer(response)
        ids = self.token_ids(answer)
        if response.outputs:
            told = len(ids) if answer.has("output_ids") else answer.integer("num_output_tokens")
            self._counts.take(answer, told)
        return self._chunk(answer, ids, self.finish_reason(answer, final=final))

    def end(self) -> Chunk | None:
        if not self._index:
            raise broken("the stream ended without a response")
        answer = Answer(pb.ModelInferResponse())
        return self._chunk(answer, (), self.finish_reason(answer, final=True))

    @abstractmethod
    def finish_reason(self, answer: Answer, *, final: bool) -> str:
        """Why the generation ended; empty while it goes on. Not empty if `final`."""

    def token_ids(self, answer: Answer) -> tuple[int, ...]:
        """The new ids, of a model that tells them."""
        return ()

    def _chunk(self, answer: Answer, ids: tuple[int, ...], finish_reason: str) -> Chunk:
        text = self._texts.delta(answer.text("text_output"), last=bool(finish_reason))
        totals = self._counts.totals()
        chunk = Chunk(
            index=self._index,
            text=text,
            token_ids=ids,
            steps=(),
            gate_reason=0,
            batch_rows=0,
            finish_reason=finish_reason,
            prompt=None if self._index else _prompt_report(answer, totals),
            totals=totals,
            size_bytes=len(text.encode()) + 4 * len(ids),
        )
        self._index += 1
        return chunk


def _prompt_report(answer: Answer, totals: Totals) -> PromptReport:
    arrived = answer.integer("arrival_time_ns")
    scheduled = answer.integer("first_scheduled_time_ns")
    first_token = answer.integer("first_token_time_ns")
    return PromptReport(
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=None,
        queue_us=_between_us(arrived, scheduled),
        prefill_us=_between_us(scheduled, first_token),
    )


def _between_us(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if start_ns is None or end_ns is None else max(0, end_ns - start_ns) // 1000
