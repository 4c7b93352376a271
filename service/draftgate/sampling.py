"""Sampling parameters: what a request may ask for, with its defaults and allowed ranges.

Used at both edges where requests come in: the gateway and the Triton engine model, which a stock
Triton client may call without the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from draftgate.errors import invalid_argument

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKENS",
    "SamplingParams",
    "Verification",
    "check_token_ids",
]

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each position."""

MAX_STOP_TOKENS = 64
"""Most stop token ids in one request."""

GREEDY_TEMPERATURE = 1e-5
"""Below it a division by the temperature could overflow, and chance has no part any more."""

_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1


class Verification(StrEnum):
    """How a sampled generation decides which drafts stand. Neither changes what any token's
    distribution is."""

    REJECTION = "rejection"
    """Speculative sampling (arXiv 2211.17192, section 2.3): accepts the most drafts."""
    COUPLED = "coupled"
    """Every position has its own noise, a function of the seed; the target's token there is the
    argmax of log p plus Gumbel noise, and a draft stands if it is that token."""


@dataclass(frozen=True)
class SamplingParams:
    """How one generation picks its tokens. Every name is a tensor of the contract."""

    max_tokens: int
    """Upper bound on emitted tokens, resumed ones included; at least 1."""
    temperature: float = 1.0
    """Logits are divided by it; below GREEDY_TEMPERATURE the most likely token is taken. In
    [0, 100]."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass. In (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one. In [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output
    (CTRL, arXiv 1909.05858, section 4.1). In [0.01, 100]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in the output. In [-2, 2]."""
    seed: int | None = None
    """With a seed, chance has no part: the same prompt and parameters give the same tokens, up to
    near ties that the arithmetic of the compute dtype may settle otherwise. With `rejection` that
    holds only as long as every step drafts the same. In [0, 2^64)."""
    verification: Verification | None = None
    """None: `coupled` with a seed, `rejection` without. `coupled` without a seed takes one by
    chance. Greedy requests ignore it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the generation; the one that did is emitted."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Report the log-probability of each emitted token and this many alternatives."""
    max_draft_len: int | None = None
    """Cap on the draft length for this request; 0 never speculates, None leaves it to the gate."""
    return_drafts: bool = False
    """Also return the drafted ids."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def coupled(self) -> bool:
        """Whether tokens are coupled to the noise of their position: the one place where the
        verification of a request is settled. False for greedy, which has no noise."""
        if self.greedy:
            return False
        if self.verification is None:
            return self.seed is not None
        return self.verification is Verification.COUPLED

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, *, vocab_size: int, prefix: str = "") -> None:
        """Check every field against its range.

        `prefix` is put before the field's name in the message, to match the caller's own request.
        Raises DraftgateError(INVALID_ARGUMENT) for the first field out of range.
        """
        _integer(prefix + "max_tokens", self.max_tokens, 1, _INT32_MAX)
        _number(prefix + "temperature", self.temperature, 0.0, 100.0)
        _number(prefix + "top_p", self.top_p, 0.0, 1.0, above_low=True)
        _integer(prefix + "top_k", self.top_k, 0, _INT32_MAX)
        _number(prefix + "min_p", self.min_p, 0.0, 1.0)
        _number(prefix + "repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number(prefix + "presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number(prefix + "frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer(prefix + "seed", self.seed, 0, _UINT64_MAX)
        if self.logprobs is not None:
            _integer(prefix + "logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_draft_len is not None:
            _integer(prefix + "max_draft_len", self.max_draft_len, 0, _INT32_MAX)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise invalid_argument(
                prefix + "stop_token_ids",
                f"{len(self.stop_token_ids)} ids",
                f"at most {MAX_STOP_TOKENS} ids",
            )
        check_token_ids(prefix + "stop_token_ids", self.stop_token_ids, vocab_size)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise DraftgateError(INVALID_ARGUMENT) naming the first id outside the vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise invalid_argument(f"{field}[{index}]", token, f"0 to {vocab_size - 1}")


def _integer(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid_argument(field, value, f"an integer from {low} to {high}")


def _number(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    too_low = value <= low if above_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        bound = f"above {low:g}" if above_low else f"from {low:g}"
        raise invalid_argument(field, value, f"a finite number {bound} to {high:g}")
