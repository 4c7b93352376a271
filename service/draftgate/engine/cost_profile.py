"""Measuring what steps cost, before the engine serves: the table that its gate starts from.

Real steps of the real engine are timed, with synthetic prompts, for a few batch sizes and every
draft length. So a time has everything in it: drafting, keeping the drafter in step, the host.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftgate.contract import DraftSource, FinishReason
from draftgate.engine.drafters import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.gating import draft_lens
from draftgate.engine.request import Output, Request
from draftgate.sampling import SamplingParams
from draftgate.speculation import CostCurve, CostTable, Mode, Policy

if TYPE_CHECKING:
    from draftgate.engine.engine import Engine

__all__ = ["hardware", "measure_costs"]

_SHORT, _LONG = 24, 512
"""Tokens of a prompt; the second to see what context costs."""

_BATCHES = (1, 4, 12, 32, 96)
"""Rows, beside as many as the engine takes."""

_MOST_TOKENS = 160
"""A pass over more is not measured, but for the longest drafts' line to go on from."""

_MEASURED = (0, 1, 2, 4, 8, 16, 32, 64)
"""Draft lengths that are measured, beside the longest."""

_REPEATS = 3
_MARGIN = 0.8
"""Share of the budget after which no further batch size is begun."""


def measure_costs(
    engine: Engine, budget_s: float = 10.0, clock: Callable[[], float] = time.perf_counter
) -> CostTable:
    """Time steps on an engine whose thread does not run yet, in about `budget_s`.

    Larger batches are left out when the time is short; the table's lines go on from the last two,
    which are measured however long they take.
    """
    begun_s = clock()
    end_s = begun_s + budget_s
    lens = draft_lens(engine.config.draft_len)
    drafter = engine.stepper.drafter
    assert drafter is not None
    engine.stepper.drafter = _FullDrafts(drafter)
    bench = _Bench(engine, clock)
    times_ms: dict[int, dict[int, float]] = {k: {} for k in lens if k in _MEASURED or k == lens[-1]}
    kv_us = bench.kv_us(lens, end_s)
    most = engine.max_batch_rows
    sizes = sorted({*(rows for rows in _BATCHES if rows < most), min(most, _BATCHES[-1])})
    for place, rows in enumerate(sizes):
        if clock() > begun_s + _MARGIN * budget_s and place > 1:
            break
        wanted = [
            draft_len
            for draft_len, found in times_ms.items()
            if rows * (draft_len + 1) <= _MOST_TOKENS or len(found) < 2
        ]
        for draft_len, step_ms in bench.steps_ms(rows, wanted, end_s).items():
            base_ms = step_ms - bench.kv_tokens * kv_us[draft_len] / 1e3
            times_ms[draft_len][rows] = max(base_ms, 0.5 * step_ms)
    bench.empty()
    engine.stepper.drafter = drafter
    return CostTable(
        {k: _curve(k, found, kv_us[k]) for k, found in _with_between(times_ms, lens).items()},
        source=f"{hardware()}; {engine.target.config.name}; {engine.config.drafter}",
        measured_at_s=round(time.time()),
    ).grown()


def _with_between(
    times_ms: Mapping[int, Mapping[int, float]], lens: Sequence[int]
) -> dict[int, Mapping[int, float]]:
    """Milliseconds by rows for every draft length: on a line between the next shorter and the next
    longer one where it was not measured."""
    found: dict[int, Mapping[int, float]] = {}
    for draft_len in lens:
        low = max(k for k in times_ms if k <= draft_len)
        high = min(k for k in times_ms if k >= draft_len)
        share = (draft_len - low) / max(high - low, 1)
        found[draft_len] = {
            rows: (1 - share) * times_ms[low][rows] + share * time_ms
            for rows, time_ms in times_ms[high].items()
        }
    return found


def _curve(draft_len: int, times_ms: Mapping[int, float], kv_us: float) -> CostCurve:
    tokens = tuple(rows * (draft_len + 1) for rows in times_ms)
    return CostCurve(tokens, tuple(times_ms.values()), kv_us)


class _FullDrafts(Drafter):
    """Has another drafter draft, and adds tokens until a draft has as many as were asked for: what
    a step costs must not depend on whether the n-gram drafter finds a match in invented prompts."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.taps, self.kv_shape = inner.taps, inner.kv_shape

    def places(self, count: int) -> int:
        return self._inner.places(count)

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        found = []
        for query, draft in zip(queries, self._inner.propose(queries), strict=True):
            lacking = query.count - len(draft.token_ids)
            if lacking and not draft.tree:
                source = draft.source or DraftSource.NGRAM
                more = tuple(query.tokens[:1]) * lacking
                draft = replace(draft, token_ids=(*draft.token_ids, *more), source=source)
            found.append(draft)
        return found

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        self._inner.observe(rows, features)

    def reset(self, row_id: int) -> None:
        self._inner.reset(row_id)

    def synced_upto(self, row_id: int) -> int:
        return self._inner.synced_upto(row_id)


class _Bench:
    """An engine with as many rows as are wanted, all of which decode."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._vocab = engine.target.config.shape.vocab_size
        self._live: dict[str, int] = {}
        """The rows by request, with the tokens that each has."""
        self._numbers = itertools.count()
        self._context = min(_SHORT, engine.max_sequence_tokens // 4)

    @property
    def kv_tokens(self) -> int:
        """Positions that attention reads in a step."""
        return sum(self._live.values())

    def kv_us(self, lens: Sequence[int], end_s: float) -> dict[int, float]:
        """Microseconds for each KV token, by draft length: from one row with a long context and one
        with a short."""
        longer = min(_LONG, self._engine.max_sequence_tokens // 2)
        ends = sorted({0, lens[-1]})
        short = self.steps_ms(1, ends, end_s)
        self.empty()
        self._fill(1, longer)
        long = self.steps_ms(1, ends, end_s)
        self.empty()
        more = max(longer - self._context, 1)
        low, high = (max(1e3 * (long[k] - short[k]) / more, 0.0) for k in (ends[0], ends[-1]))
        return {k: low + (high - low) * k / max(lens[-1], 1) for k in lens}

    def steps_ms(self, rows: int, draft_lens: Sequence[int], end_s: float) -> dict[int, float]:
        """A step with each draft length: the median of some, all draft lengths in turn, so that a
        hiccup of the machine falls on all alike. After `end_s` one of each has to do."""
        times: dict[int, list[float]] = {draft_len: [] for draft_len in draft_lens}
        for number in range(1 + _REPEATS):
            if number > 1 and self._clock() > end_s:
                break
            for draft_len, found in times.items():
                self._fill(rows, self._context)
                self._engine.set_policy(Policy(mode=Mode.FIXED, draft_len=draft_len))
                begun_s = self._clock()
                self._engine.step()
                if number:
                    found.append(1e3 * (self._clock() - begun_s))
        return {draft_len: statistics.median(found) for draft_len, found in times.items()}

    def empty(self) -> None:
        """Take all rows out."""
        for request_id in self._live:
            self._engine.stop(request_id)
        self._engine.step()

    def _fill(self, rows: int, context: int) -> None:
        """At least so many rows, new ones with this context, all of which decode."""
        lacking = rows - len(self._live)
        if lacking <= 0:
            return
        self._engine.set_policy(Policy(mode=Mode.OFF))
        for _ in range(lacking):
            self._submit(context)
        while len(self._live) < rows:
            self._engine.step()

    def _submit(self, context: int) -> None:
        number = next(self._numbers)
        request_id = f"cost profile {number}"

        def took(output: Output) -> None:
            if output.finish_reason is FinishReason.NONE:
                self._live[request_id] = self._live.get(request_id, context) + len(output.token_ids)
            else:
                self._live.pop(request_id, None)

        ids = tuple((7919 * (i + 31 * number) + 11) % self._vocab for i in range(context))
        params = SamplingParams(
            max_tokens=self._engine.max_sequence_tokens, temperature=0.0, ignore_eos=True
        )
        self._engine.submit(Request(request_id, ids, params), took)


def hardware() -> str:
    """The processor by name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
