"""What one generation did, counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftgate.totals import Totals

__all__ = ["GenerationReport"]


@dataclass
class GenerationReport:
    """Usage and acceptance so far; final once the generation has ended, for whatever reason."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Emitted tokens; rejected drafts and drafts cut off by the end do not count."""
    finish_reason: str = ""
    """Empty unless the generation came to its own end."""
    resumes: int = 0
    """How often it lost its model server and went on elsewhere."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    """At index n the number of verify steps that accepted n drafts."""
    told: Totals | None = None
    """What an engine said that tells no single tokens and steps. It then stands in the place of
    what was counted here, which is nothing."""

    @property
    def totals(self) -> Totals:
        """What is known, and what is not."""
        if self.told is not None:
            return self.told
        return Totals(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            verify_steps=self.verify_steps,
        )

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted or one of the two is not known."""
        totals = self.totals
        if totals.accepted_tokens is None or not totals.drafted_tokens:
            return None
        return totals.accepted_tokens / totals.drafted_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / verify steps; None without a verify step or if one is not known."""
        totals = self.totals
        if totals.accepted_tokens is None or not totals.verify_steps:
            return None
        return 1 + totals.accepted_tokens / totals.verify_steps

    def add_step(self, drafted: int, accepted: int) -> None:
        """Count one engine step; one that drafted nothing is no verify step."""
        if not drafted:
            return
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1
