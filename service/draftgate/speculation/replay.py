"""Running a law over loads that are given, with costs and acceptance that are given.

The world is a batch of rows that all decode. Each step costs what the true table says, each draft
is accepted by chance as its row's rates say, and the law sees what it would see in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draftgate.speculation.costs import CostTable
from draftgate.speculation.laws import Law
from draftgate.speculation.load import Load, Outcome, RowLoad

_Array = npt.NDArray[np.int64]

__all__ = ["Phase", "PhaseResult", "Replay", "Requests", "World", "replay"]


@dataclass(frozen=True)
class Phase:
    """A time of constant load."""

    rows: int
    """Rows that decode."""
    duration_s: float
    context_tokens: int = 0
    """KV tokens of a row at its start."""
    prefill_every: int = 0
    """A prompt chunk shares every so many steps; 0: none does."""
    prefill_tokens: int = 128
    """Tokens of such a chunk."""


@dataclass(frozen=True)
class Requests:
    """What rows are like: each is of one kind, by chance."""

    kinds: Sequence[tuple[float, Sequence[float]]]
    """Share of the rows, and their conditional acceptance by place in the draft."""
    output_tokens: int = 256
    """After so many a row is another request."""

    def survival(self, places: int) -> list[float]:
        """S_j over all kinds: how likely token j of a draft is to stand."""
        total = sum(share for share, _ in self.kinds)
        found = np.zeros(places)
        for share, rates in self.kinds:
            found += share / total * np.cumprod(_padded(rates, places))
        return [float(value) for value in found]

    def halved(self) -> Requests:
        """The same with every first draft accepted half as often."""
        kinds = [(share, [rates[0] / 2, *rates[1:]]) for share, rates in self.kinds]
        return Requests(kinds, self.output_tokens)


@dataclass(frozen=True)
class World:
    """What is true."""

    costs: CostTable
    requests: Requests
    phases: Sequence[Phase]
    cost_factor: Callable[[int, float], float] = lambda tokens, time_s: 1.0
    """How much dearer a step with so many tokens is than `costs` says."""
    requests_later: Requests | None = None
    """What rows are like from the middle on; None: no different."""


@dataclass
class PhaseResult:
    """What a law made of a phase."""

    rows: int
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    switches: int = 0
    settled_tokens: float = 0.0
    """After the first `settle_steps`."""
    settled_seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def settled_tokens_per_s(self) -> float:
        """Without the steps in which the law may still find its way."""
        return self.settled_tokens / self.settled_seconds


@dataclass
class Replay:
    """What a law made of all phases."""

    phases: list[PhaseResult] = field(default_factory=list)
    draft_lens: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the start, and K from there on."""
    prefill_switches: int = 0
    """Switches in steps with a prompt chunk, or right after one."""

    @property
    def tokens(self) -> float:
        return sum(phase.tokens for phase in self.phases)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def switches(self) -> int:
        return sum(phase.switches for phase in self.phases)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(phase.seconds for phase in self.phases)


def replay(law: Law, world: World, *, seed: int, settle_steps: int = 200) -> Replay:
    """Run the law through all phases. The chance of a row and step depends on the seed alone, so
    that laws meet the same luck as far as they do the same."""
    random = np.random.default_rng(seed)
    places = max(world.costs.draft_lens)
    found = Replay()
    time_s, before, chunk_before = 0.0, -1, False
    rows = _Rows(world, places, random)
    total_s = sum(phase.duration_s for phase in world.phases)
    for phase in world.phases:
        result = PhaseResult(phase.rows)
        found.phases.append(result)
        rows.resize(phase.rows, law, phase)
        until_s = time_s + phase.duration_s
        while time_s < until_s:
            if world.requests_later is not None and time_s >= total_s / 2:
                rows.become(world.requests_later)
            chunk = phase.prefill_every > 0 and result.steps % phase.prefill_every == 0
            load = Load(
                rows=rows.loads(),
                prefill_tokens=phase.prefill_tokens if chunk else 0,
                kv_tokens=rows.kv_tokens,
            )
            draft_len, row_lens = law.decide(load)
            lens = np.asarray(row_lens)
            if draft_len != before and not _partial(lens):
                if before >= 0:
                    result.switches += 1
                    found.prefill_switches += chunk or chunk_before
                found.draft_lens.append((time_s, draft_len))
                before = draft_len
            accepted = rows.accept(lens)
            tokens_in_pass = load.plain_tokens + int(lens.sum())
            step_ms = world.costs.step_ms(draft_len, tokens_in_pass, load.kv_tokens)
            step_ms *= world.cost_factor(tokens_in_pass, time_s)
            emitted = float(len(lens) + accepted.sum())
            result.steps += 1
            result.tokens += emitted
            result.seconds += step_ms / 1e3
            if result.steps > settle_steps:
                result.settled_tokens += emitted
                result.settled_seconds += step_ms / 1e3
            time_s += step_ms / 1e3
            chunk_before = chunk
            law.observe(rows.outcomes(lens, accepted), load, step_ms)
            rows.advance(accepted, law, phase)
    return found


class _Rows:
    """The rows of the world, as arrays."""

    def __init__(self, world: World, places: int, random: np.random.Generator) -> None:
        self._requests = world.requests
        self._places = places
        self._random = random
        self._next_id = 0
        self._ids: list[int] = []
        self._kind = np.zeros(0, dtype=int)
        self._left = np.zeros(0, dtype=int)
        self._context = np.zeros(0, dtype=int)
        self._set_rates()

    @property
    def kv_tokens(self) -> int:
        return int(self._context.sum())

    def become(self, requests: Requests) -> None:
        if requests is not self._requests:
            self._requests = requests
            self._set_rates()

    def resize(self, count: int, law: Law, phase: Phase) -> None:
        for row_id in self._ids[count:]:
            law.forget(row_id)
        self._ids = self._ids[:count]
        more = count - len(self._ids)
        kinds, left = self._fresh(max(more, 0))
        # At the start rows are anywhere in their output, or they would all end at once.
        left = np.maximum((left * self._random.random(len(left))).astype(int), 1)
        self._kind = np.concatenate([self._kind[:count], kinds])
        self._left = np.concatenate([self._left[:count], left])
        self._context = np.full(count, phase.context_tokens)
        for _ in range(max(more, 0)):
            self._ids.append(self._next_id)
            self._next_id += 1

    def loads(self) -> list[RowLoad]:
        return [
            RowLoad(row_id, int(left) - 1)
            for row_id, left in zip(self._ids, self._left, strict=True)
        ]

    def accept(self, lens: _Array) -> _Array:
        """How many drafts of each row stand, [rows]."""
        luck = self._random.random((len(self._ids), self._places))
        stands = np.cumprod(luck < self._rates[self._kind], axis=1)
        return np.minimum(stands.sum(axis=1), lens)

    def outcomes(self, lens: _Array, accepted: _Array) -> list[Outcome]:
        return [
            Outcome(row_id, 1, int(drafted), range(int(stood)))
            for row_id, drafted, stood in zip(self._ids, lens, accepted, strict=True)
        ]

    def advance(self, accepted: _Array, law: Law, phase: Phase) -> None:
        self._left = self._left - 1 - accepted
        self._context = self._context + 1 + accepted
        for place in np.flatnonzero(self._left <= 0):
            law.forget(self._ids[place])
            self._ids[place] = self._next_id
            self._next_id += 1
            kinds, left = self._fresh(1)
            self._kind[place], self._left[place] = kinds[0], left[0]
            self._context[place] = phase.context_tokens

    def _fresh(self, count: int) -> tuple[_Array, _Array]:
        shares = np.array([share for share, _ in self._requests.kinds])
        kinds = self._random.choice(len(shares), size=count, p=shares / shares.sum())
        return kinds, np.full(count, self._requests.output_tokens)

    def _set_rates(self) -> None:
        kinds = self._requests.kinds
        self._rates = np.array([_padded(rates, self._places) for _, rates in kinds])


def _padded(rates: Sequence[float], places: int) -> list[float]:
    """As many rates as places; the last one holds for those beyond."""
    return [*rates[:places], *[rates[-1]] * (places - len(rates))]


def _partial(lens: _Array) -> bool:
    """Whether only a few rows draft, as in a probe."""
    return 0 < np.count_nonzero(lens) <= len(lens) // 4
