"""Running a law through a world that is given: costs, acceptance, load.

The world is a batch of rows that all decode. Each step costs what the true table says, each draft
is accepted by chance as its row's rates say, and the law sees what it would see in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftgate.speculation.costs import drafted_share
from draftgate.speculation.crowd import Crowd, Drafts
from draftgate.speculation.laws import Law
from draftgate.speculation.load import Load
from draftgate.speculation.world import World

__all__ = ["PhaseResult", "Replay", "replay"]


@dataclass
class PhaseResult:
    """What a law made of a phase, step by step."""

    rows: int
    begun_s: float
    """Since the replay's start."""
    ends_s: list[float] = field(default_factory=list)
    """When each step ended."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of each step."""
    draft_lens: list[int] = field(default_factory=list)
    """K of each step."""
    switches: int = 0
    """Steps whose K was not that of the step before, probes among them."""

    @property
    def steps(self) -> int:
        return len(self.ends_s)

    @property
    def tokens(self) -> int:
        return sum(self.emitted)

    @property
    def ended_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else self.begun_s

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def since(self, time_s: float) -> tuple[int, float]:
        """Tokens and seconds of the steps that ended after this time."""
        first = int(np.searchsorted(self.ends_s, time_s, side="right"))
        begun_s = self.ends_s[first - 1] if first else self.begun_s
        return sum(self.emitted[first:]), self.ended_s - begun_s


@dataclass(frozen=True)
class Replay:
    """What a law made of all phases."""

    phases: Sequence[PhaseResult]

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def switches(self) -> int:
        return sum(phase.switches for phase in self.phases)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def replay(law: Law, world: World, *, seed: int) -> Replay:
    """Run the law through all phases.

    The seed alone says what the rows' texts are like, so that laws can be compared.
    """
    crowd = Crowd(world.requests, max(world.costs.draft_lens), seed)
    random = np.random.default_rng((seed, len(world.phases)))
    results: list[PhaseResult] = []
    time_s, later = 0.0, world.requests_later
    before: int | None = None
    for phase in world.phases:
        for row_id in crowd.begin(phase, time_s):
            law.forget(row_id)
        result = PhaseResult(phase.rows, time_s)
        results.append(result)
        until_s = time_s + phase.duration_s
        step = 0
        while time_s < until_s:
            if later is not None and time_s >= world.duration_s / 2:
                crowd.become(later)
                later = None
            rows = crowd.rows()
            load = Load(rows, phase.chunk(step), crowd.kv_tokens)
            choice = law.decide(load)
            switched = before not in (None, choice.draft_len)
            before = choice.draft_len
            accepted = crowd.accept(choice.row_lens)
            drafted = int(choice.row_lens.sum())
            tokens = load.plain_tokens + drafted
            # Where no row may draft, nobody does, whatever was decided.
            draft_len = choice.draft_len if drafted else 0
            share = drafted_share(drafted, draft_len, len(rows))
            step_ms = world.costs.step_ms(draft_len, tokens, load.kv_tokens, share)
            step_ms *= world.cost_factor(tokens)
            if world.jitter:
                step_ms *= math.exp(world.jitter * random.standard_normal())
            law.observe(Drafts(rows.ids, choice.row_lens, accepted), load, step_ms)
            time_s += step_ms / 1e3
            for row_id in crowd.advance(accepted, time_s):
                law.forget(row_id)
            result.ends_s.append(time_s)
            result.emitted.append(len(rows) + int(accepted.sum()))
            result.draft_lens.append(choice.draft_len)
            result.switches += switched
            time_s = crowd.wait(time_s)
            step += 1
    return Replay(results)
