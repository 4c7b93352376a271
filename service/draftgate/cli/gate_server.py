"""The commands of `draftgate gate` that talk to a server."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from typing import Annotated

import typer
from google.protobuf import json_format

from draftgate._pb.draftgate.v1 import gate_pb2, generation_pb2
from draftgate.cli import options
from draftgate.cli.client import GatewayClient

__all__ = ["set_policy", "state", "watch"]

Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Give up after this long.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


class ModeName(StrEnum):
    """`--mode`."""

    AUTO = "auto"
    OFF = "off"
    FIXED = "fixed"


_MODES = {
    ModeName.AUTO: gate_pb2.GATE_MODE_AUTO,
    ModeName.OFF: gate_pb2.GATE_MODE_OFF,
    ModeName.FIXED: gate_pb2.GATE_MODE_FIXED,
}


def state(
    server: options.Server = options.DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout: Timeout = 10.0,
) -> None:
    """Say what the gate does now, why, and what it expects."""

    async def ask() -> gate_pb2.GateState:
        async with GatewayClient(server) as client:
            return await client.gate_state(timeout_s=timeout)

    _show(asyncio.run(ask()), as_json=as_json)


def watch(
    server: options.Server = options.DEFAULT_SERVER,
    interval_ms: Annotated[int, typer.Option(help="Between two lines.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """The same again and again, a line each, until Ctrl-C."""

    async def follow() -> None:
        async with GatewayClient(server) as client:
            async for each in client.watch_gate(interval_ms=interval_ms):
                typer.echo(_json(each) if as_json else _line(each))

    asyncio.run(follow())


def set_policy(
    mode: Annotated[ModeName, typer.Option(help="Who decides the draft length.")],
    server: options.Server = options.DEFAULT_SERVER,
    draft_len: Annotated[int | None, typer.Option(help="For `fixed`.")] = None,
    max_draft_len: Annotated[int | None, typer.Option(help="Longest draft.")] = None,
    max_step_ms: Annotated[
        float | None, typer.Option(help="Ceiling on a step, so on the gap between chunks.")
    ] = None,
    max_tpot_ms: Annotated[
        float | None, typer.Option(help="Wish for the mean time per output token.")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="At the next start too.")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """Replace the gate's policy; it holds from the next step on."""
    if (draft_len is not None) != (mode is ModeName.FIXED):
        raise typer.BadParameter(
            "goes with --mode fixed, and with no other", param_hint="--draft-len"
        )
    policy = gate_pb2.GatePolicy(mode=_MODES[mode], draft_len=draft_len or 0)
    for name, value in (
        ("max_draft_len", max_draft_len),
        ("max_step_ms", max_step_ms),
        ("max_tpot_ms", max_tpot_ms),
    ):
        if value is not None:
            setattr(policy, name, value)

    async def ask() -> gate_pb2.GateState:
        async with GatewayClient(server) as client:
            return await client.set_gate_policy(policy, save=save, timeout_s=timeout)

    _show(asyncio.run(ask()), as_json=False)


def _show(found: gate_pb2.GateState, *, as_json: bool) -> None:
    if as_json:
        typer.echo(_json(found))
        return
    for name, text in _rows(found):
        typer.echo(f"{name}\t{text}")


def _json(found: gate_pb2.GateState) -> str:
    return json.dumps(json_format.MessageToDict(found, preserving_proto_field_name=True))


def _line(found: gate_pb2.GateState) -> str:
    speedup = f"{found.expected_speedup:.2f}x" if found.HasField("expected_speedup") else "-"
    return (
        f"K {found.draft_len}  {_reason(found.reason):<14}  rows {found.rows:>3}  "
        f"step {found.measured_step_ms:7.1f} ms (expected {found.expected_step_ms:7.1f})  "
        f"speedup {speedup}"
    )


def _rows(found: gate_pb2.GateState) -> list[tuple[str, str]]:
    policy = found.policy
    mode = gate_pb2.GateMode.Name(policy.mode).removeprefix("GATE_MODE_").lower()
    limits = [
        f"{name} {getattr(policy, name):g}"
        for name in ("max_draft_len", "max_step_ms", "max_tpot_ms")
        if policy.HasField(name)
    ]
    if policy.mode == gate_pb2.GATE_MODE_FIXED:
        limits.insert(0, f"draft_len {policy.draft_len}")
    rows = [
        ("policy", ", ".join([mode, *limits])),
        ("draft length", f"{found.draft_len} ({_reason(found.reason)})"),
        ("rows", f"{found.rows}"),
        ("steps", f"{found.steps}, {found.switches} switches"),
        (
            "step time",
            f"{found.measured_step_ms:.1f} ms, expected {found.expected_step_ms:.1f} ms",
        ),
    ]
    if found.HasField("expected_speedup"):
        rows.append(("expected speedup", f"{found.expected_speedup:.2f}x"))
    for each in found.acceptance:
        source = generation_pb2.DraftSource.Name(each.draft_source).removeprefix("DRAFT_SOURCE_")
        rates = " ".join(f"{rate:.2f}" for rate in each.rates)
        rows.append((f"acceptance, {source.lower()}", rates))
    for each in found.reasons:
        rows.append((f"steps, {_reason(each.reason)}", f"{each.steps}"))
    if found.HasField("costs"):
        age = f", {found.costs.age_s / 60:.0f} min old" if found.costs.HasField("age_s") else ""
        rows.append(("costs", f"{found.costs.source}{age}"))
        for each in found.costs.corrections:
            kind = "with" if each.drafted else "without"
            name = f"correction, from {each.tokens} tokens {kind} drafts"
            rows.append((name, f"{each.ratio:.2f} ({each.observations:.0f} steps)"))
    return rows


def _reason(number: generation_pb2.GateReason.ValueType) -> str:
    try:
        name = generation_pb2.GateReason.Name(number)
    except ValueError:
        return f"reason {number}"
    return name.removeprefix("GATE_REASON_").lower().replace("_", " ")
