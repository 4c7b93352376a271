"""The textbook arithmetic of speculative decoding: one acceptance rate for every draft, costs in
target passes (arXiv 2211.17192, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.errors import invalid_argument

__all__ = ["Explanation", "break_even_acceptance", "expected_tokens", "explain", "speedup"]

_PRECISION = 1e-9


@dataclass(frozen=True)
class Explanation:
    """What a draft length brings."""

    alpha: float
    """Share of drafts accepted, each given that the one before was."""
    draft_len: int
    draft_cost: float
    """A draft step over a target pass of one token."""
    verify_cost: float
    """A target pass over all drafts over one of one token."""
    tokens: float
    """Expected of a verify step."""
    speedup: float
    """Over decoding without drafts."""
    break_even: float | None
    """The acceptance at which it pays exactly nothing; None: not even 1 pays."""
    best_draft_len: int
    """Of 0 to 16, with these costs of a draft step and of a verified token."""
    best_speedup: float


def expected_tokens(alpha: float, draft_len: int) -> float:
    """(1 - alpha^(K + 1)) / (1 - alpha): tokens of a verify step with K drafts, the target's own
    included (equation 1)."""
    return sum(alpha**place for place in range(draft_len + 1))


def speedup(
    alpha: float, draft_len: int, draft_cost: float, token_cost: float = 0.0, rows: int = 1
) -> float:
    """Tokens a second over those without drafts (theorem 3.8 with a cost for verified tokens).

    draft_cost: a draft step over a target pass of one token for every row; token_cost: one more
    token of one row in a pass, over the same.
    """
    step = 1 + draft_len * (draft_cost + token_cost * rows)
    return expected_tokens(alpha, draft_len) / step


def break_even_acceptance(
    draft_len: int, draft_cost: float, token_cost: float = 0.0, rows: int = 1
) -> float | None:
    """The acceptance from which on so many drafts pay; None: none does."""
    if draft_len == 0 or speedup(1.0, draft_len, draft_cost, token_cost, rows) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if speedup(middle, draft_len, draft_cost, token_cost, rows) < 1:
            low = middle
        else:
            high = middle
    return high


def explain(
    alpha: float, draft_len: int, draft_cost: float, *, token_cost: float = 0.0, rows: int = 1
) -> Explanation:
    """Raises DraftgateError(INVALID_ARGUMENT) for the first argument out of range."""
    for name, value, high in (
        ("alpha", alpha, 1.0),
        ("draft_cost", draft_cost, 100.0),
        ("token_cost", token_cost, 100.0),
    ):
        if not 0 <= value <= high:
            raise invalid_argument(name, value, f"0 to {high:g}")
    if not 0 <= draft_len <= 64:
        raise invalid_argument("k", draft_len, "an integer 0 to 64")
    if not 1 <= rows <= 100_000:
        raise invalid_argument("batch", rows, "an integer 1 to 100000")
    best = max(range(17), key=lambda k: (speedup(alpha, k, draft_cost, token_cost, rows), -k))
    return Explanation(
        alpha=alpha,
        draft_len=draft_len,
        draft_cost=draft_cost,
        verify_cost=1 + draft_len * token_cost * rows,
        tokens=expected_tokens(alpha, draft_len),
        speedup=speedup(alpha, draft_len, draft_cost, token_cost, rows),
        break_even=break_even_acceptance(draft_len, draft_cost, token_cost, rows),
        best_draft_len=best,
        best_speedup=speedup(alpha, best, draft_cost, token_cost, rows),
    )
