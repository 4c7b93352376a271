"""The table that the speculation benchmark prints: four sections with the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speculation_cost import DraftCost
from speculation_runs import Acceptance, Cell, LoneStream

__all__ = ["print_table"]

_LINE = "{:<8}{:<13}{:>4}{:>3}{:>8}{:>9}{:>6}{:>7}  {}"


def print_table(
    drafter: str,
    acceptance: Sequence[Acceptance],
    lone_streams: Sequence[LoneStream],
    cost: DraftCost | None,
    cells: Sequence[Cell],
) -> None:
    """drafter: whose drafts the streams and the cells are with."""
    _row("task", "drafter", "rows", "K", "step ms", "tokens/s", "x K=0", "length")
    print("Accepted: share at position 1, 2, ..., and who drafted")
    for a in acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in a.positions)
        note = f"{rates}  {_shares(a.sources)}"
        _row(
            a.task,
            _named(a.drafter, a.draft_width),
            a.rows,
            a.draft_len,
            length=a.length,
            note=note,
        )
    print("One stream")
    for s in lone_streams:
        speed = (s.step_ms, s.tokens_per_s, s.speedup, s.acceptance_length)
        fastest = max(o.speedup for o in lone_streams if o.task == s.task)
        _row(
            s.task,
            _named(drafter, s.draft_width),
            1,
            s.draft_len,
            *speed,
            _best(s.speedup, fastest),
        )
    if cost is not None:
        print("Parts of a step with one row")
        _row("pass", "eagle", 1, step_ms=cost.target_pass.median_ms, note="of the target")
        draft, sync = cost.draft_step.median_ms, cost.sync.median_ms
        _row("draft", "eagle", 1, step_ms=draft, note=f"one more token: {cost.share:.1%} of a pass")
        _row("sync", "eagle", 1, step_ms=sync, note=f"after a pass: {cost.sync_share:.1%} of it")
    print("Batches")
    for c in cells:
        speed = (c.step_ms, c.tokens_per_s, c.speedup, c.acceptance_length)
        fastest = max(o.speedup for o in cells if o.rows == c.rows)
        _row("all", drafter, c.rows, c.draft_len, *speed, _best(c.speedup, fastest))


def _named(drafter: str, draft_width: int) -> str:
    return f"{drafter} tree" if draft_width > 1 else drafter


def _row(
    task: str,
    drafter: str,
    rows: int | str,
    draft_len: int | str = "",
    step_ms: float | str = "",
    tokens_per_s: float | str = "",
    speedup: float | str = "",
    length: float | str = "",
    note: str = "",
) -> None:
    texts = [
        value if isinstance(value, str) else f"{value:.{digits}f}"
        for value, digits in ((step_ms, 2), (tokens_per_s, 1), (speedup, 2), (length, 2))
    ]
    print(_LINE.format(task, drafter, rows, draft_len, *texts, note).rstrip())


def _shares(sources: Mapping[str, int]) -> str:
    total = sum(sources.values())
    return " ".join(f"{name} {count / total:.0%}" for name, count in sorted(sources.items()))


def _best(speedup: float, fastest: float) -> str:
    return "best" if speedup == fastest else ""
