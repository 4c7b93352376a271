"""What a step costs: a table of measured times, by tokens in the pass, KV tokens and draft length.

For each draft length the table has points (tokens, milliseconds): tokens counts everything in the
pass, `rows * (K + 1)` and prompt tokens, and the time is that of the whole step, with drafting,
keeping the drafter in step, and the host's part. Between two points it is a straight line. A cliff,
such as the end of captured CUDA graphs, is two points one token apart and stays one.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftgate.errors import DraftgateError, invalid_argument
from draftgate.jsonfile import read_object

__all__ = ["CostCurve", "CostTable", "drafted_share"]

_FORMAT = "draftgate-costs/1"

_MOST_TOKENS = 10_000_000


@dataclass(frozen=True)
class CostCurve:
    """The steps of one draft length."""

    tokens: tuple[int, ...]
    """Tokens in the pass, rising."""
    times_ms: tuple[float, ...]
    """What a step took with so many, without what `kv_us` accounts for."""
    kv_us: float = 0.0
    """Microseconds for each KV token that attention reads."""

    def scaled(self, factor: float) -> CostCurve:
        """The same with every time multiplied."""
        times_ms = tuple(factor * time_ms for time_ms in self.times_ms)
        return CostCurve(self.tokens, times_ms, factor * self.kv_us)

    def base_ms(self, tokens: float) -> float:
        """Of a step without context. Between two points a line, below the first its time, beyond
        the last its slope unless it falls."""
        at = bisect_left(self.tokens, tokens)
        if at < len(self.tokens) and self.tokens[at] == tokens:
            return self.times_ms[at]
        if at == 0 or len(self.tokens) == 1:
            return self.times_ms[0]
        beyond = at == len(self.tokens)
        at -= beyond
        rise_ms = self.times_ms[at] - self.times_ms[at - 1]
        slope = rise_ms / (self.tokens[at] - self.tokens[at - 1])
        if beyond:
            return self.times_ms[at] + max(slope, 0.0) * (tokens - self.tokens[at])
        return self.times_ms[at - 1] + slope * (tokens - self.tokens[at - 1])


@dataclass(frozen=True)
class CostTable:
    """A curve for each draft length, 0 among them."""

    curves: Mapping[int, CostCurve]
    source: str = ""
    """Where it comes from: hardware, checkpoint, drafter."""
    measured_at_s: float | None = None
    """When, in seconds since 1970; None: not said."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Anything else that the file says."""

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) naming what is wrong."""
        if 0 not in self.curves:
            raise invalid_argument("costs", sorted(self.curves), "draft lengths with 0 among them")
        for draft_len, curve in self.curves.items():
            name = f"costs[{draft_len}]"
            if draft_len < 0:
                raise invalid_argument("costs", draft_len, "draft lengths from 0 on")
            if not curve.tokens or len(curve.tokens) != len(curve.times_ms):
                raise invalid_argument(
                    name, len(curve.tokens), "as many times as tokens, at least 1"
                )
            if any(b <= a for a, b in zip(curve.tokens, curve.tokens[1:], strict=False)):
                raise invalid_argument(f"{name}.tokens", list(curve.tokens), "rising numbers")
            for tokens in (curve.tokens[0], curve.tokens[-1]):
                if not 1 <= tokens <= _MOST_TOKENS:
                    raise invalid_argument(f"{name}.tokens", tokens, f"1 to {_MOST_TOKENS}")
            if not all(0 < time_ms < float("inf") for time_ms in curve.times_ms):
                raise invalid_argument(f"{name}.ms", list(curve.times_ms), "times above 0")
            if not 0 <= curve.kv_us < float("inf"):
                raise invalid_argument(f"{name}.kv_us", curve.kv_us, "at least 0")

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths it knows, rising."""
        return tuple(sorted(self.curves))

    def step_ms(
        self,
        draft_len: int,
        tokens: int,
        kv_tokens: int = 0,
        share: float = 1.0,
        *,
        factor: float = 1.0,
        plain_factor: float = 1.0,
    ) -> float:
        """A whole step with this draft length, one of `draft_lens`.

        share: as of `drafted_share`. A curve was measured where every row
        drafts as much, so it knows `tokens` with few rows; where only some do, there are more rows
        than that. What they add is taken from how the plain curve grows, as far as they do not
        draft: without any drafted token a step is a plain one and drafting for nobody, which is
        what a step of one row takes beyond a plain one of as many tokens.

        factor, plain_factor: what this draft length's curve and the plain one are corrected by.
        """
        curve, plain, alone = self.curves[draft_len], self.curves[0], draft_len + 1
        base_ms = curve.base_ms(tokens)
        time_ms = factor * (base_ms + kv_tokens * curve.kv_us / 1e3)
        if draft_len and share < 1.0:
            lacking_ms = plain_factor * (plain.base_ms(tokens) - plain.base_ms(alone))
            lacking_ms -= factor * (base_ms - curve.base_ms(alone))
            time_ms += (1.0 - share) * max(lacking_ms, 0.0)
        return time_ms

    def scaled(self, factor: float) -> CostTable:
        """The same with every time multiplied."""
        curves = {k: curve.scaled(factor) for k, curve in self.curves.items()}
        return CostTable(curves, self.source, self.measured_at_s, self.notes)

    def grown(self) -> CostTable:
        """The same where no step with more tokens is cheaper than one with fewer.

        That holds for one draft length of a dense model; a measured table may say otherwise by
        noise. It does not hold between draft lengths, nor always for a mixture of experts.
        """
        curves = {}
        for draft_len, curve in self.curves.items():
            times: list[float] = []
            for time_ms in curve.times_ms:
                times.append(max(time_ms, times[-1]) if times else time_ms)
            curves[draft_len] = CostCurve(curve.tokens, tuple(times), curve.kv_us)
        return CostTable(curves, self.source, self.measured_at_s, self.notes)

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a file as `save` writes it.

        Raises DraftgateError: INVALID_ARGUMENT naming what is wrong with it, FAILED_PRECONDITION
        when there is none or it is no JSON object.
        """
        raw = read_object(path)
        if raw.get("format") != _FORMAT:
            raise invalid_argument(f"{path}: format", raw.get("format"), repr(_FORMAT))
        curves: dict[int, CostCurve] = {}
        held = raw.get("curves")
        if not isinstance(held, list):
            raise invalid_argument(f"{path}: curves", held, "a list")
        for place, item in enumerate(held):
            name = f"{path}: curves[{place}]"
            if not isinstance(item, dict):
                raise invalid_argument(name, item, "an object")
            draft_len = item.get("draft_len")
            if type(draft_len) is not int or draft_len in curves:
                raise invalid_argument(f"{name}.draft_len", draft_len, "an integer, each once")
            curves[draft_len] = CostCurve(
                tokens=tuple(_numbers(item, "tokens", name, whole=True)),  # type: ignore[arg-type]
                times_ms=tuple(float(v) for v in _numbers(item, "ms", name)),
                kv_us=float(_number(item.get("kv_us", 0.0), f"{name}.kv_us")),
            )
        measured = raw.get("measured_at_s")
        notes = raw.get("notes", {})
        try:
            return cls(
                curves,
                source=str(raw.get("source", "")),
                measured_at_s=None if measured is None else float(measured),
                notes={str(key): str(value) for key, value in notes.items()},
            )
        except DraftgateError as error:
            raise DraftgateError(error.code, f"{path}: {error.message}") from error

    def save(self, path: Path) -> None:
        """Write the file that `load` reads, whole or not at all."""
        content = {
            "format": _FORMAT,
            "source": self.source,
            "measured_at_s": self.measured_at_s,
            "notes": dict(self.notes),
            "curves": [
                {
                    "draft_len": draft_len,
                    "tokens": list(curve.tokens),
                    "ms": [round(time_ms, 4) for time_ms in curve.times_ms],
                    "kv_us": curve.kv_us,
                }
                for draft_len, curve in sorted(self.curves.items())
            ],
        }
        half = path.with_name(f"{path.name}.half")
        half.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        half.rename(path)


def drafted_share(drafted: int, draft_len: int, rows: int) -> float:
    """Drafted tokens over those of a step whose every row drafts `draft_len`; 1 where none can."""
    return drafted / (draft_len * rows) if draft_len and rows else 1.0


def _numbers(
    item: Mapping[str, object], key: str, name: str, *, whole: bool = False
) -> Sequence[float]:
    values = item.get(key)
    if not isinstance(values, list):
        raise invalid_argument(f"{name}.{key}", values, "a list of numbers")
    return [_number(value, f"{name}.{key}", whole=whole) for value in values]


def _number(value: object, name: str, *, whole: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise invalid_argument(name, value, "whole numbers" if whole else "numbers")
    return value
