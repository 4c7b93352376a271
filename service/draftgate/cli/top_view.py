"""One frame of `draftgate top`: the latest state, and what happened since the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftgate._pb.draftgate.v1.gate_pb2 import GateState
from draftgate._pb.draftgate.v1.model_pb2 import Model
from draftgate.cli.gate_words import age_words, policy_words, reason_name, source_name
from draftgate.cli.render import clean

__all__ = ["frame"]

_BAR = 10
"""Characters of a full bar."""

_PLACES = 8
_CORRECTIONS = 8
"""No more than fit on a screen."""


def frame(model: Model, before: GateState | None, now: GateState) -> RenderableType:
    """before: the state of an interval ago; None: the first has just come."""
    since = _since(before, now)
    tables = [_acceptance(now), _candidates(now), _reasons(since, now), _corrections(now)]
    return Group(
        Text(_title(model, now), style="bold"),
        _summary(model, since, now),
        Columns([table for table in tables if table is not None], padding=(1, 3)),
    )


@dataclass(frozen=True)
class _Interval:
    """What happened between two states of one run of the engine."""

    seconds: float
    emitted: int
    steps: int
    verify_steps: int
    drafted: int
    accepted: int
    reasons: dict[int, int]


def _since(before: GateState | None, now: GateState) -> _Interval | None:
    """None without a state before, or where the engine was restarted after it."""
    if before is None or now.uptime_s <= before.uptime_s or now.steps < before.steps:
        return None
    counted = {count.reason: count.steps for count in before.reasons}
    return _Interval(
        seconds=now.uptime_s - before.uptime_s,
        emitted=now.emitted_tokens - before.emitted_tokens,
        steps=now.steps - before.steps,
        verify_steps=now.verify_steps - before.verify_steps,
        drafted=now.drafted_tokens - before.drafted_tokens,
        accepted=now.accepted_tokens - before.accepted_tokens,
        reasons={each.reason: each.steps - counted.get(each.reason, 0) for each in now.reasons},
    )


def _title(model: Model, now: GateState) -> str:
    drafter = f"{model.drafter}, up to {model.max_draft_len}" if model.drafter else "no drafter"
    return clean(
        f"draftgate top · {model.name} ({model.compute_dtype}; {drafter}) · "
        f"up {age_words(now.uptime_s)}"
    )


def _summary(model: Model, since: _Interval | None, now: GateState) -> Table:
    held = now.kv_used_tokens / now.kv_total_tokens if now.kv_total_tokens else 0.0
    rows = [
        (
            "rows",
            f"{now.running_rows} of {model.max_batch_rows} running, {now.waiting_rows} waiting",
        ),
        (
            "KV cache",
            f"{_bar(held)} {held:.0%} of {now.kv_total_tokens:,} tokens",
        ),
        ("speed", _speed(since)),
        ("drafts", _decided(now)),
        ("step time", _step_time(now)),
        ("speedup", _speedup(now)),
        ("accepted", _accepted(since, now)),
        ("policy", policy_words(now.policy)),
    ]
    if now.HasField("costs"):
        age = f", {age_words(now.costs.age_s)} old" if now.costs.HasField("age_s") else ""
        rows.append(("step times", f"{now.costs.source}{age}"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(clean(value)))
    return grid


def _speed(since: _Interval | None) -> str:
    if since is None:
        return "-"
    return (
        f"{since.emitted / since.seconds:.1f} tokens/s, {since.steps / since.seconds:.1f} steps/s "
        f"over {since.seconds:.1f} s"
    )


def _decided(now: GateState) -> str:
    if not now.steps:
        return "-"
    decided = f"K {now.draft_len}, {reason_name(now.reason)}"
    return decided if now.running_rows or now.waiting_rows else f"idle; last: {decided}"


def _step_time(now: GateState) -> str:
    if not now.steps:
        return "-"
    measured = f"{now.measured_step_ms:.1f} ms"
    if not now.HasField("expected_step_ms") or not now.expected_step_ms:
        return measured
    off = now.measured_step_ms / now.expected_step_ms - 1
    return f"{measured}, predicted {now.expected_step_ms:.1f} ms ({off:+.0%})"


def _speedup(now: GateState) -> str:
    if not now.HasField("expected_speedup"):
        return "-"
    return f"{now.expected_speedup:.2f}x predicted over no drafts"


def _accepted(since: _Interval | None, now: GateState) -> str:
    """Over the interval, or where it drafted nothing, since the engine's start."""
    drafted, accepted, steps, when = (
        (since.drafted, since.accepted, since.verify_steps, "")
        if since is not None and since.drafted
        else (now.drafted_tokens, now.accepted_tokens, now.verify_steps, " since the start")
    )
    if not drafted:
        return "nothing drafted"
    return f"{accepted / drafted:.0%} of drafts, {1 + accepted / steps:.2f} tokens a pass{when}"


def _acceptance(now: GateState) -> Table | None:
    """How likely each place of a draft is to stand once the one before it does."""
    if not now.acceptance:
        return None
    places = min(max(len(each.rates) for each in now.acceptance), _PLACES)
    table = _table("acceptance by place", ("drafter", *map(str, range(1, places + 1))))
    for each in now.acceptance:
        table.add_row(
            source_name(each.draft_source), *(f"{rate:.2f}" for rate in each.rates[:_PLACES])
        )
    return table


def _candidates(now: GateState) -> Table | None:
    """What each draft length promised for the latest step."""
    if not now.candidates:
        return None
    table = _table("what K promises", ("K", "tokens", "ms", "tokens/s"))
    for each in now.candidates:
        speed = 1e3 * each.tokens / each.step_ms if each.step_ms else 0.0
        table.add_row(
            f"{each.draft_len}",
            f"{each.tokens:.2f}",
            f"{each.step_ms:.1f}",
            f"{speed:.1f}",
            style="bold" if each.draft_len == now.draft_len else "",
        )
    return table


def _reasons(since: _Interval | None, now: GateState) -> Table | None:
    """Over the interval, or where no step ran in it, since the engine's start."""
    counts: dict[int, int] = {each.reason: each.steps for each in now.reasons}
    when = "since the start"
    if since is not None and any(since.reasons.values()):
        counts, when = since.reasons, f"{since.seconds:.1f} s"
    total = sum(counts.values())
    if not total:
        return None
    table = _table(f"reasons, {when}", ("reason", "", "steps"))
    for reason, steps in sorted(counts.items(), key=lambda item: -item[1]):
        if steps:
            table.add_row(reason_name(reason), _bar(steps / total), f"{steps / total:.0%}")
    return table


def _corrections(now: GateState) -> Table | None:
    """What steps really take over what the table of costs says."""
    if not now.HasField("costs") or not now.costs.corrections:
        return None
    table = _table("real over table times", ("tokens from", "drafts", "ratio"))
    seen = sorted(now.costs.corrections, key=lambda each: -each.observations)[:_CORRECTIONS]
    for each in sorted(seen, key=lambda each: (each.tokens, each.drafted)):
        table.add_row(f"{each.tokens}", "with" if each.drafted else "none", f"{each.ratio:.2f}")
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 1))
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", header_style="dim")
    return table


def _bar(share: float) -> str:
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (_BAR - filled)
