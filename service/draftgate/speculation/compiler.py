"""The law as a table for engines that take their draft length from one, by batch size.

Each engine has its own words for it, and TensorRT-LLM changed what the numbers mean between two
versions without a word: from keys that are the fewest rows of a range to keys that are the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftgate.errors import invalid_argument
from draftgate.speculation.costs import CostTable

__all__ = ["TARGETS", "Range", "compile_schedule", "schedule"]

_TIE = 0.01
"""A shorter draft is taken where a longer one gains less than this (vLLM's tuner does so too)."""

_ZERO_GAIN = 0.05
"""No drafts at all are taken only where one draft would lose more than this: the engines' drafters
fall behind meanwhile."""


@dataclass(frozen=True)
class Range:
    """Batch sizes with one draft length."""

    first: int
    last: int
    draft_len: int
    speedup: tuple[float, float]
    """Tokens a second over those without drafts, at the first and at the last."""


def schedule(
    costs: CostTable,
    survival: Sequence[float],
    *,
    max_rows: int,
    draft_lens: Sequence[int],
    context_tokens: int = 0,
) -> list[Range]:
    """The best draft length for each batch size from 1 to `max_rows`.

    survival: S_j, how likely draft j is to stand; context_tokens: KV tokens of a row.
    Raises DraftgateError(INVALID_ARGUMENT) where an argument does not fit the others.
    """
    known = [k for k in sorted(set(draft_lens)) if k in costs.curves and k <= len(survival)]
    if not known or known == [0]:
        raise invalid_argument(
            "draft_lens", list(draft_lens), "lengths that costs and acceptance have"
        )
    if not 1 <= max_rows <= 100_000:
        raise invalid_argument("max_batch_size", max_rows, "an integer 1 to 100000")
    ranges: list[Range] = []
    for rows in range(1, max_rows + 1):
        gains = {k: _speedup(costs, survival, rows, k, context_tokens) for k in known}
        best = _best(gains)
        first, at_first = rows, gains[best]
        if ranges and ranges[-1].draft_len == best:
            before = ranges.pop()
            first, at_first = before.first, before.speedup[0]
        ranges.append(Range(first, rows, best, (at_first, gains[best])))
    return ranges


def compile_schedule(target: str, ranges: Sequence[Range]) -> str:
    """The engine's configuration, in YAML, with what to expect in comments.

    Raises DraftgateError(INVALID_ARGUMENT) for a target that is not one of TARGETS.
    """
    if target not in TARGETS:
        raise invalid_argument("target", target, " or ".join(TARGETS))
    return TARGETS[target](ranges)


def _speedup(
    costs: CostTable, survival: Sequence[float], rows: int, draft_len: int, context_tokens: int
) -> float:
    kv_tokens = rows * context_tokens
    plain_ms = costs.step_ms(0, rows, kv_tokens)
    step_ms = costs.step_ms(draft_len, rows * (draft_len + 1), kv_tokens)
    return (1 + sum(survival[:draft_len])) * plain_ms / step_ms


def _best(gains: Mapping[int, float]) -> int:
    most = max(gains.values())
    best = min(k for k, gain in gains.items() if gain * (1 + _TIE) >= most)
    shortest = min((k for k in gains if k > 0), default=0)
    if best == 0 and gains[shortest] > 1 - _ZERO_GAIN:
        return shortest
    return best


def _header(ranges: Sequence[Range]) -> list[str]:
    lines = ["# Expected tokens/s over no speculation, by batch size:"]
    for each in ranges:
        low, high = each.speedup
        rows = f"{each.first}" if each.first == each.last else f"{each.first}-{each.last}"
        lines.append(f"#   {rows:>9}: K = {each.draft_len}, {low:.2f}x to {high:.2f}x")
    return lines


def _longest(ranges: Sequence[Range]) -> int:
    return max(each.draft_len for each in ranges)


def _tensorrt_llm_1_2(ranges: Sequence[Range]) -> str:
    longest = _longest(ranges)
    lines = [
        "# TensorRT-LLM 1.2.1: keys are the fewest active requests of a range; key 1 is required",
        "# and has the value max_draft_len.",
        *_header(ranges),
    ]
    if any(each.draft_len == 0 for each in ranges):
        lines += [
            "# 0 turns speculation off for every request that is running then, for the rest of its",
            "# life: only requests that arrive later speculate again.",
        ]
    lines += [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {longest}",
        "  speculative_model: /path/to/eagle3-head",
        "  # The default one-model drafter ignores the schedule here, without a warning.",
        "  eagle3_one_model: false",
        "  draft_len_schedule:",
    ]
    if ranges[0].draft_len != longest:
        lines.append(
            f"    # {ranges[0].draft_len} would be best from 1 on; the key 1 has to be the longest."
        )
    for number, each in enumerate(ranges):
        value = longest if number == 0 else each.draft_len
        lines.append(f"    {each.first}: {value}")
        if number == 0 and value != each.draft_len and each.last > 1:
            lines.append(f"    2: {each.draft_len}")
    return "\n".join(lines) + "\n"


def _tensorrt_llm_1_3(ranges: Sequence[Range]) -> str:
    longest = _longest(ranges)
    lines = [
        "# TensorRT-LLM 1.3 and later: keys are the most active requests of a range; the smallest",
        "# has the value max_draft_len, and beyond the largest nothing is drafted.",
        *_header(ranges),
    ]
    kept = list(ranges)
    while kept and kept[-1].draft_len == 0:
        kept.pop()
    if len(kept) < len(ranges):
        lines += [
            f"# Beyond {kept[-1].last if kept else 0} requests nothing is drafted. The drafter",
            "# then misses what those requests emit, and their acceptance stays low afterwards.",
        ]
    lines += [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {longest}",
        "  speculative_model: /path/to/eagle3-head",
        "  draft_len_schedule:",
    ]
    for number, each in enumerate(kept):
        if number == 0 and each.draft_len != longest:
            lines.append(f"    1: {longest}  # required; {each.draft_len} would be better")
            if each.last == 1:
                continue
        lines.append(f"    {each.last}: {each.draft_len}")
    return "\n".join(lines) + "\n"


def _vllm(ranges: Sequence[Range]) -> str:
    rows = ", ".join(f"[{each.first}, {each.last}, {each.draft_len}]" for each in ranges)
    lines = [
        "# vLLM 0.25 and later: rows of [from, to, K] by scheduled requests.",
        *_header(ranges),
        "speculative_config:",
        "  method: eagle3",
        "  model: /path/to/eagle3-head",
        f"  num_speculative_tokens: {_longest(ranges)}",
        f"  num_speculative_tokens_per_batch_size: [{rows}]",
    ]
    return "\n".join(lines) + "\n"


TARGETS: Mapping[str, Callable[[Sequence[Range]], str]] = {
    "tensorrt-llm==1.2.1": _tensorrt_llm_1_2,
    "tensorrt-llm>=1.3": _tensorrt_llm_1_3,
    "vllm": _vllm,
}
"""What can be compiled for."""
