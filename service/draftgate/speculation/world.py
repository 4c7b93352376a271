"""What a replay takes for true: loads by phase, what rows are like, what steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftgate.speculation.costs import CostTable

__all__ = ["Kind", "Phase", "Requests", "World"]


@dataclass(frozen=True)
class Phase:
    """A time of constant load."""

    rows: int
    """Rows that decode, or would without pauses."""
    duration_s: float
    context_tokens: int = 0
    """KV tokens of a row at its start."""
    prefill_every: int = 0
    """A prompt chunk shares every so many steps; 0: none does."""
    prefill_tokens: int = 128
    """Tokens of such a chunk."""
    prefill_steps: int = 1
    """How many steps in a row, of every `prefill_every`, have one."""
    pause_s: float = 0.0
    """How long, on average, a row stays away between two requests; 0: the next one is waiting."""

    def chunk(self, step: int) -> int:
        """Prompt tokens in the phase's step number `step`, from 0 on."""
        within = self.prefill_every and step % self.prefill_every < self.prefill_steps
        return self.prefill_tokens if within else 0


@dataclass(frozen=True)
class Kind:
    """Requests that are alike."""

    share: float
    """How many there are of them, over the sum of all kinds' shares."""
    rates: Sequence[float]
    """Conditional acceptance by place in the draft; the last holds for those beyond."""

    def padded(self, places: int) -> list[float]:
        """As many rates as places."""
        return [*self.rates[:places], *[self.rates[-1]] * (places - len(self.rates))]


@dataclass(frozen=True)
class Requests:
    """What rows are like: each request is of one kind, by chance."""

    kinds: Sequence[Kind]
    output_tokens: int = 256
    """After so many a row is another request."""

    @classmethod
    def alike(cls, survival: Sequence[float], output_tokens: int = 256) -> Requests:
        """Of one kind. survival: S_j, how likely draft j is to stand."""
        before = [1.0, *survival]
        rates = [b / a if a else 0.0 for a, b in zip(before, survival, strict=False)]
        return cls([Kind(1.0, rates)], output_tokens)

    @property
    def places(self) -> int:
        """How far in a draft something is said of its acceptance."""
        return max(len(kind.rates) for kind in self.kinds)

    def survival(self, places: int) -> list[float]:
        """S_j over all kinds."""
        total = sum(kind.share for kind in self.kinds)
        found = np.zeros(places)
        for kind in self.kinds:
            found += kind.share / total * np.cumprod(kind.padded(places))
        return [float(value) for value in found]

    def halved(self) -> Requests:
        """The same with every first draft accepted half as often, and so with half of every S_j."""
        kinds = [
            replace(kind, rates=[kind.rates[0] / 2, *(kind.rates[1:] or kind.rates)])
            for kind in self.kinds
        ]
        return replace(self, kinds=kinds)


@dataclass(frozen=True)
class World:
    """All of it."""

    costs: CostTable
    requests: Requests
    phases: Sequence[Phase]
    cost_factor: Callable[[int], float] = lambda tokens: 1.0
    """How much dearer a step with so many tokens is than `costs` says."""
    requests_later: Requests | None = None
    """What rows are like from the middle on; None: no different."""
    jitter: float = 0.0
    """Standard deviation of a step's time, over that time."""

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)
