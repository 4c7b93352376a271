"""The law's constants."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GateSettings"]


@dataclass(frozen=True)
class GateSettings:
    """How the gate weighs, chooses and probes."""

    switch_gain: float = 0.03
    """Another draft length must promise so much more before it is taken ..."""
    dwell_steps: int = 8
    """... and the present one have lasted so many steps ..."""
    gain_steps: int = 32
    """After so many steps it may be less: half of it after twice as many, and so on."""
    least_gain: float = 0.01
    """But never less than this ..."""
    lasting_steps: int = 64
    """... and so little must be promised for so many steps."""
    urgent_share: float = 0.85
    """... unless it promises less than this share of a shorter one: that is taken at once."""
    hold_steps: int = 8
    """A decision to draft is kept for so many steps while the load stays as it is; 1: for none but
    its own."""
    mean_steps: int = 16
    """What draft lengths promise is averaged over about so many steps of those that are weighed:
    rows come and go, and near their ends draft less."""
    prefill_mean_steps: int = 256
    """The same for prompt tokens beside the rows, which come in chunks."""
    by_row: bool = True
    """Whether drafts go to the rows where they are likeliest to stand, and no further than they
    pay, instead of to all rows alike."""
    probe_loss: float = 0.003
    """While nothing is drafted, share of the time that may be spent on finding out whether it would
    pay again."""
    probe_credit: float = 2.0
    """So much of it, in times of a step, may be saved up. A new gate has it: nothing else tells a
    table that is too dear for drafts, and so is never tried, from one that is right."""
    probe_every_steps: int = 16
    """No more often than this ..."""
    probe_rarest_steps: int = 256
    """... and where probes find nothing new, less and less often down to this."""
