"""What one generation did, counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / verify steps; None without a verify step."""
        return 1 + self.accepted_tokens / self.verify_steps if self.verify_steps else None

    def add_step(self, drafted: int, accepted: int) -> None:
        """Count one engine step; one that drafted nothing is no verify step."""
        if not drafted:
            return
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1
