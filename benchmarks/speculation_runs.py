"""Generations on running engines: what is accepted of their drafts, and how fast they come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from draftgate.contract import DraftSource, FinishReason
from draftgate.engine import Engine, Output, Request
from draftgate.sampling import SamplingParams

__all__ = [
    "Acceptance",
    "Cell",
    "LoneStream",
    "measure_acceptance",
    "measure_cells",
    "measure_lone_streams",
]


@dataclass(frozen=True)
class Acceptance:
    """One task's prompts with one drafter, greedy."""

    task: str
    drafter: str
    rows: int
    """Most of them that ran together."""
    draft_len: int
    draft_width: int
    """1: an EAGLE drafter drafts chains."""
    length: float
    """Acceptance length: 1 + accepted / verify steps; a step without a draft is none."""
    positions: tuple[float, ...]
    """Of the verify steps that drafted so far, the share that accepted position 1, 2, ..."""
    sources: Mapping[str, int]
    """Verify steps by who drafted."""


@dataclass(frozen=True)
class LoneStream:
    """One task's prompts, one stream, one draft length."""

    task: str
    draft_len: int
    draft_width: int
    """1: an EAGLE drafter drafts chains."""
    step_ms: float
    """Mean time of a step after the first of each answer."""
    tokens_per_s: float
    """Tokens after the first of each answer, over the time since then."""
    speedup: float
    """tokens/s over that of K = 0."""
    acceptance_length: float


@dataclass(frozen=True)
class Cell:
    """One batch size with one draft length, while all rows decode."""

    rows: int
    draft_len: int
    steps: int
    """Steps that were timed."""
    step_ms: float
    """Their mean time."""
    tokens_per_s: float
    """Of all rows together."""
    speedup: float
    """tokens/s over that of K = 0."""
    acceptance_length: float
    tokens_per_step: float
    """Emitted by a row in a step, those without a draft included."""


def measure_acceptance(
    engine: Engine, task: str, prompts: Sequence[Sequence[int]], tokens: int
) -> Acceptance:
    """Many prompts at once: what is accepted does not depend on the batch, near ties apart.

    prompts: token ids. tokens: longest answer to each.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    runs = [_submit(engine, str(number), ids, params) for number, ids in enumerate(prompts)]
    tally = _Tally()
    for run in runs:
        tally.add_answer(run)
    return Acceptance(
        task=task,
        drafter=engine.config.drafter,
        rows=min(engine.config.max_batch_rows, len(prompts)),
        draft_len=engine.config.draft_len,
        draft_width=engine.config.draft_width,
        length=tally.acceptance_length,
        positions=tuple(tally.passed[p] / count for p, count in sorted(tally.reached.items())),
        sources=tally.sources,
    )


def measure_lone_streams(
    engines: Sequence[Engine], task: str, prompts: Sequence[Sequence[int]], tokens: int
) -> list[LoneStream]:
    """Each prompt on every engine before the next, so that drifts fall on all alike.

    engines: the first has draft length 0. tokens: longest answer to each prompt.
    """
    tallies = [_Tally() for _ in engines]
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    for number, ids in enumerate(prompts):
        for engine, tally in zip(engines, tallies, strict=True):
            tally.add_answer(_submit(engine, str(number), ids, params))
    return [
        LoneStream(
            task=task,
            draft_len=engine.config.draft_len,
            draft_width=engine.config.draft_width,
            step_ms=1e3 * tally.seconds / tally.outputs,
            tokens_per_s=tally.tokens_per_s,
            speedup=tally.tokens_per_s / tallies[0].tokens_per_s,
            acceptance_length=tally.acceptance_length,
        )
        for engine, tally in zip(engines, tallies, strict=True)
    ]


def measure_cells(
    engines: Mapping[int, Engine], prompts: Sequence[Sequence[int]], steps: int, rounds: int
) -> list[Cell]:
    """All prompts at once with every draft length, in turn, every other round backwards.

    engines: by draft length, 0 among them, with a row for each prompt. steps: timed in each round.
    Raises RuntimeError when a generation ended or lost its row before as many were timed.
    """
    tallies = {draft_len: _Tally() for draft_len in engines}
    for number in range(rounds):
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        for draft_len in order:
            _time_window(engines[draft_len], prompts, steps, tallies[draft_len])
    return [
        Cell(
            rows=len(prompts),
            draft_len=draft_len,
            steps=steps * rounds,
            step_ms=1e3 * tally.seconds / (steps * rounds),
            tokens_per_s=tally.tokens_per_s,
            speedup=tally.tokens_per_s / tallies[0].tokens_per_s,
            acceptance_length=tally.acceptance_length,
            tokens_per_step=tally.tokens / tally.outputs,
        )
        for draft_len, tally in tallies.items()
    ]


@dataclass
class _Tally:
    """Sums over generations."""

    tokens: int = 0
    seconds: float = 0.0
    outputs: int = 0
    verify_steps: int = 0
    accepted: int = 0
    reached: dict[int, int] = field(default_factory=dict)
    """Verify steps that drafted up to a position, by the position, from 1."""
    passed: dict[int, int] = field(default_factory=dict)
    """Of these, the ones that accepted it."""
    sources: dict[str, int] = field(default_factory=dict)

    def add_answer(self, run: _Run) -> None:
        """A whole generation, run to its end, after its first output."""
        run.finish()
        times_s = [at_s for at_s, _ in run.outputs]
        self.add((output for _, output in run.outputs[1:]), times_s[-1] - times_s[0])

    def add(self, outputs: Iterable[Output], seconds: float) -> None:
        """Outputs and the time in which they came."""
        self.seconds += seconds
        for output in outputs:
            self.tokens += len(output.token_ids)
            self.outputs += 1
            step = output.verify_step
            if step is None:
                continue
            self.verify_steps += 1
            self.accepted += step.accepted
            name = DraftSource(step.source).name.lower()
            self.sources[name] = self.sources.get(name, 0) + 1
            for position in range(1, len(step.draft_ids) + 1):
                self.reached[position] = self.reached.get(position, 0) + 1
                passed = step.accepted >= position
                self.passed[position] = self.passed.get(position, 0) + passed

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.verify_steps if self.verify_steps else 1.0


@dataclass
class _Run:
    """One generation's outputs with their times."""

    engine: Engine
    outputs: list[tuple[float, Output]] = field(default_factory=list)

    def __call__(self, output: Output) -> None:
        self.outputs.append((time.perf_counter(), output))

    def finish(self) -> None:
        """Run steps until its end."""
        while not self.outputs or self.outputs[-1][1].finish_reason is FinishReason.NONE:
            self.engine.step()


def _submit(
    engine: Engine, request_id: str, input_ids: Sequence[int], params: SamplingParams
) -> _Run:
    run = _Run(engine)
    engine.submit(Request(request_id, tuple(input_ids), params), run)
    return run


class _Window:
    """Receives the outputs of all rows and parts them into steps.

    A row answers at most once a step, so a step ends where one answers again. The window opens with
    the step after which every row has answered, and is as many steps long as were asked for. No row
    ends in it, or steps with fewer rows would be counted and drafts that do well the most.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self._rows = rows
        self._length = steps
        self._steps: list[tuple[float, dict[str, Output]]] = []
        """Time of the first output, and outputs by request."""
        self._opened: int | None = None
        """Index of the step from whose outputs on time is taken."""
        self.done = False
        """The window has been measured, or cannot be any more."""

    def __call__(self, output: Output) -> None:
        if output.finish_reason is not FinishReason.NONE:
            self.done = True
        if self.done:
            return
        if not self._steps or output.request_id in self._steps[-1][1]:
            self._steps.append((time.perf_counter(), {}))
        latest = self._steps[-1][1]
        latest[output.request_id] = output
        if len(latest) < self._rows:
            return
        if self._opened is None:
            self._opened = len(self._steps) - 1
        elif len(self._steps) - 1 >= self._opened + self._length:
            self.done = True

    def add_to(self, tally: _Tally) -> None:
        """Raises RuntimeError when not every row decoded in every step."""
        first = self._opened
        counted = [] if first is None else self._steps[first + 1 :]
        outputs = [output for _, step in counted for output in step.values()]
        decoding = sum(output.batch_rows == self._rows for output in outputs)
        if first is None or not len(outputs) == decoding == self._rows * self._length:
            raise RuntimeError(
                f"{self._rows} rows: {decoding} outputs while all of them decode, "
                f"not {self._length} of each"
            )
        tally.add(outputs, counted[-1][0] - self._steps[first][0])


def _time_window(
    engine: Engine, prompts: Sequence[Sequence[int]], steps: int, tally: _Tally
) -> None:
    """One generation for each prompt, past its end of sequence, until the window is measured."""
    params = SamplingParams(max_tokens=engine.max_sequence_tokens, temperature=0.0, ignore_eos=True)
    window = _Window(len(prompts), steps)
    for number, ids in enumerate(prompts):
        engine.submit(Request(str(number), tuple(ids), params), window)
    while not window.done:
        engine.step()
    for number in range(len(prompts)):
        engine.stop(str(number))
    engine.step()
    window.add_to(tally)
