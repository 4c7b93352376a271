"""`draftgate gate`: look at the load gate of a server, steer it, and reckon with its law."""

from __future__ import annotations

from typing import Annotated

import typer

from draftgate.cli import gate_record, gate_replay, gate_server
from draftgate.speculation.compiler import TARGETS, compile_schedule, schedule
from draftgate.speculation.explain import explain as explained
from draftgate.speculation.grids import find_costs
from draftgate.speculation.inputs import read_requests

__all__ = ["gate_app"]

gate_app = typer.Typer(
    help="Look at the load gate, steer it, reckon with its law.", no_args_is_help=True
)
gate_app.command(name="state")(gate_server.state)
gate_app.command(name="watch")(gate_server.watch)
gate_app.command(name="set")(gate_server.set_policy)
gate_app.command(name="record")(gate_record.record)
gate_app.command(name="replay")(gate_replay.replay_laws)


@gate_app.command()
def explain(
    alpha: Annotated[float, typer.Option(help="Share of drafts accepted.")],
    k: Annotated[int, typer.Option("--k", help="Draft length.")],
    draft_cost: Annotated[float, typer.Option(help="A draft step over a target pass.")],
    token_cost: Annotated[
        float, typer.Option(help="One more verified token over a target pass of one row.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(help="Rows that decode together.")] = 1,
) -> None:
    """The textbook's arithmetic: what a draft length brings at an acceptance."""
    found = explained(alpha, k, draft_cost, token_cost=token_cost, rows=batch)
    rows = [
        ("expected tokens per pass", f"{found.tokens:.2f}"),
        ("speedup", f"{found.speedup:.2f}x"),
        (
            "break-even acceptance",
            "none: it costs more than all drafts bring"
            if found.break_even is None
            else f"{found.break_even:.3f}",
        ),
        ("best draft length", f"{found.best_draft_len} ({found.best_speedup:.2f}x)"),
    ]
    for name, text in rows:
        typer.echo(f"{name}\t{text}")


@gate_app.command(name="compile")
def compile_table(
    costs: gate_replay.Costs,
    acceptance: gate_replay.Acceptance,
    target: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}.")],
    max_batch_size: Annotated[int, typer.Option(help="Largest batch of the deployment.")] = 256,
    context_tokens: Annotated[int, typer.Option(help="Usual context of a request.")] = 0,
) -> None:
    """The law as another engine's configuration."""
    table, requests = find_costs(costs), read_requests(acceptance)
    ranges = schedule(
        table,
        requests.survival(requests.places),
        max_rows=max_batch_size,
        draft_lens=table.draft_lens,
        context_tokens=context_tokens,
    )
    typer.echo(compile_schedule(target, ranges), nl=False)
