"""The commands of `draftgate gate` that look at a server's gate and steer it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from contextlib import aclosing
from enum import StrEnum
from typing import Annotated

import typer
from google.protobuf import json_format

from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate.cli import options
from draftgate.cli.client import GatewayClient
from draftgate.cli.gate_words import age_words, policy_words, reason_name, source_name
from draftgate.cli.render import print_note, write_lines
from draftgate.cli.rows import print_rows

__all__ = ["set_policy", "state", "watch"]

_NO_LIMIT = "none"
_LIMITS = {"max_draft_len": int, "max_step_ms": float, "max_tpot_ms": float}

Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Give up after this long.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, with the names of the API.")]


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

    found = asyncio.run(ask())
    if as_json:
        write_lines(sys.stdout, _json(found))
    else:
        print_rows(_rows(found))


def watch(
    server: options.Server = options.DEFAULT_SERVER,
    interval_ms: Annotated[int, typer.Option(help="Between two lines.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """The same again and again, a line each, until Ctrl-C."""

    async def follow() -> None:
        async with (
            GatewayClient(server) as client,
            aclosing(client.watch_gate(interval_ms=interval_ms)) as states,
        ):
            async for each in states:
                write_lines(sys.stdout, _json(each.state) if as_json else _line(each.state))

    # Ctrl-C is how it ends.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow())


def set_policy(
    server: options.Server = options.DEFAULT_SERVER,
    mode: Annotated[
        ModeName | None,
        typer.Option(help="Who decides the draft length: the gate, nobody, or --draft-len."),
    ] = None,
    draft_len: Annotated[
        int | None, typer.Option(help="Draft length of every step, with the mode fixed.")
    ] = None,
    max_draft_len: Annotated[
        str | None, typer.Option(metavar="N|none", help="Longest draft.")
    ] = None,
    max_step_ms: Annotated[
        str | None,
        typer.Option(
            metavar="MS|none", help="Ceiling on a step's time, so on the gap between two chunks."
        ),
    ] = None,
    max_tpot_ms: Annotated[
        str | None, typer.Option(metavar="MS|none", help="Wish for the mean time per output token.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the whole policy for the next start too.")
    ] = False,
    timeout: Timeout = 10.0,
) -> None:
    """Change the gate's policy, from the next step on; what is not named stays as it is.

    The server takes whole policies: this reads the present one, changes what is named, `none` takes
    a limit away, and sends all of it. What was and what is are printed.
    """
    limits = {"max_draft_len": max_draft_len, "max_step_ms": max_step_ms}
    limits["max_tpot_ms"] = max_tpot_ms
    if not save and mode is None and draft_len is None and set(limits.values()) == {None}:
        raise typer.BadParameter("name what to change, --mode off say")

    async def ask() -> tuple[gate_pb2.GatePolicy, gate_pb2.GatePolicy]:
        async with GatewayClient(server) as client:
            before = (await client.gate_state(timeout_s=timeout)).policy
            policy = gate_pb2.GatePolicy()
            policy.CopyFrom(before)
            _change_mode(policy, mode, draft_len)
            for name, text in limits.items():
                if text is not None:
                    _change_limit(policy, name, text)
            after = await client.set_gate_policy(policy, save=save, timeout_s=timeout)
            return before, after.policy

    before, after = asyncio.run(ask())
    print_rows([("was", policy_words(before)), ("is", policy_words(after))])
    if not save:
        print_note("Until the server's next start; --save keeps it.")


def _change_mode(policy: gate_pb2.GatePolicy, mode: ModeName | None, draft_len: int | None) -> None:
    """Raises typer.BadParameter for a draft length without the mode fixed, and the reverse."""
    if mode is not None:
        policy.mode = _MODES[mode]
    if policy.mode != gate_pb2.GATE_MODE_FIXED:
        if draft_len is not None:
            raise typer.BadParameter("goes with --mode fixed", param_hint="--draft-len")
        policy.ClearField("draft_len")
    elif draft_len is not None:
        _put(policy, "draft_len", draft_len)
    elif not policy.HasField("draft_len"):
        raise typer.BadParameter("needs --draft-len", param_hint="--mode fixed")


def _change_limit(policy: gate_pb2.GatePolicy, name: str, text: str) -> None:
    """Raises typer.BadParameter for text that is neither a number nor `none`."""
    if text == _NO_LIMIT:
        policy.ClearField(name)  # type: ignore[arg-type]  # a field's name
        return
    try:
        value = _LIMITS[name](text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor {_NO_LIMIT}", param_hint=_option(name)
        ) from None
    _put(policy, name, value)


def _put(policy: gate_pb2.GatePolicy, name: str, value: float) -> None:
    try:
        setattr(policy, name, value)
    except ValueError:
        raise typer.BadParameter(
            f"{value} is too large or too small", param_hint=_option(name)
        ) from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _json(found: gate_pb2.GateState) -> str:
    return json.dumps(
        json_format.MessageToDict(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


def _line(found: gate_pb2.GateState) -> str:
    speedup = f"{found.expected_speedup:.2f}x" if found.HasField("expected_speedup") else "-"
    return (
        f"rows {found.running_rows:>3} + {found.waiting_rows:<3}  "
        f"K {found.draft_len} {reason_name(found.reason):<14}  "
        f"step {found.measured_step_ms:7.1f} ms, expected {_expected(found):>7}  "
        f"speedup {speedup}"
    )


def _expected(found: gate_pb2.GateState) -> str:
    return f"{found.expected_step_ms:.1f}" if found.HasField("expected_step_ms") else "-"


def _rows(found: gate_pb2.GateState) -> list[tuple[str, str]]:
    rows = [
        ("policy", policy_words(found.policy)),
        ("rows", f"{found.running_rows} running, {found.waiting_rows} waiting"),
        ("KV cache", f"{found.kv_used_tokens:,} of {found.kv_total_tokens:,} tokens"),
    ]
    if found.steps:
        rows += [
            ("last draft length", f"{found.draft_len} ({reason_name(found.reason)})"),
            ("last step time", f"{found.measured_step_ms:.1f} ms, expected {_expected(found)} ms"),
        ]
    if found.HasField("expected_speedup"):
        rows.append(("expected speedup", f"{found.expected_speedup:.2f}x"))
    rows += [
        ("steps", f"{found.steps:,}, the draft length changed {found.switches:,} times"),
        ("tokens", f"{found.emitted_tokens:,} in {age_words(found.uptime_s)}"),
        ("drafts accepted", f"{found.accepted_tokens:,} of {found.drafted_tokens:,}"),
    ]
    for each in found.acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in each.rates)
        rows.append((f"acceptance by place, {source_name(each.draft_source)}", rates))
    for candidate in found.candidates:
        rows.append(
            (
                f"draft length {candidate.draft_len}",
                f"{candidate.tokens:.2f} tokens in {candidate.step_ms:.1f} ms",
            )
        )
    for count in found.reasons:
        rows.append((f"steps, {reason_name(count.reason)}", f"{count.steps:,}"))
    if found.HasField("costs"):
        age = f", {age_words(found.costs.age_s)} old" if found.costs.HasField("age_s") else ""
        rows.append(("step times from", f"{found.costs.source}{age}"))
        for correction in found.costs.corrections:
            kind = "with" if correction.drafted else "without"
            name = f"corrected from {correction.tokens} tokens {kind} drafts"
            rows.append((name, f"x {correction.ratio:.2f} ({correction.observations:.0f} steps)"))
    return rows
