"""Drawing replays: the draft length over time, and throughput beside the best fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation.replay import Replay

__all__ = ["draw_replays"]


def draw_replays(path: Path, found: Mapping[str, Replay], best: Sequence[float]) -> None:
    """Write a PNG. best: tokens a second of the best fixed draft length in each phase.

    Raises DraftgateError(FAILED_PRECONDITION) without matplotlib, or where it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            "drawing needs matplotlib, which is not installed: pip install 'draftgate[plot]'",
        ) from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    lengths, speeds = figure.subplots(2, 1, sharex=True)
    # The first law lies on top.
    for place, (name, each) in reversed([*enumerate(found.items())]):
        look: dict[str, Any] = {
            "label": name,
            "color": f"C{place}",
            "linewidth": 3 - 2 * (place > 0),
        }
        times_s = [0.0, *(time_s for phase in each.phases for time_s in phase.ends_s)]
        draft_lens = [k for phase in each.phases for k in phase.draft_lens]
        lengths.step(times_s, [*draft_lens[:1], *draft_lens], where="pre", **look)
        edges_s = [edge for phase in each.phases for edge in (phase.begun_s, phase.ended_s)]
        shares = [p.tokens_per_s / most for p, most in zip(each.phases, best, strict=True)]
        speeds.plot(edges_s, [share for share in shares for _ in range(2)], **look)
    speeds.axhline(1.0, color="black", linestyle="--", linewidth=1)
    lengths.set_ylabel("draft length K")
    lengths.set_title("rows: " + _rows(next(iter(found.values()))), fontsize="small")
    speeds.set_ylabel("tokens/s over the best fixed K's")
    speeds.set_xlabel("seconds")
    lengths.legend(loc="upper right", fontsize="small")
    speeds.legend(loc="lower right", fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"cannot write {path}: {error.strerror}"
        ) from error


def _rows(each: Replay) -> str:
    rows = [phase.rows for phase in each.phases]
    return ", ".join(map(str, rows)) if len(rows) <= 20 else f"{min(rows)} to {max(rows)}"
