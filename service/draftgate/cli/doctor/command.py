"""The command, and how its report looks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from draftgate.cli.doctor.result import Result, Verdict
from draftgate.cli.render import clean, colour_wanted, write_lines
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["doctor"]

_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
_NAME_WIDTH = 13


def doctor(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADDRESS]",
            help="A running gateway to look at, HOST:PORT, instead of this machine.",
            show_default=False,
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where that gateway serves operators.",
            show_default="ADDRESS",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Settings to look at, YAML."),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The checkpoint to serve.", show_default="the packaged model's"
        ),
    ] = None,
    drafter_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The drafter's weights.",
            show_default="for the packaged model, those in drafters/ of the checkout",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Give up a check after this long.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look over this machine, or a running gateway: a line for each check, and what to do.

    DRAFTGATE_API_KEY and DRAFTGATE_CA_FILE are used as by other commands. Exits with 1 if a check
    fails.
    """
    results = _results(address, admin, config_file, model_dir, drafter_dir, timeout)
    if as_json:
        found = list(results)
        shown = {"checks": [dataclasses.asdict(each) for each in found]}
        write_lines(sys.stdout, json.dumps(shown, indent=2))
    else:
        found = []
        for each in results:
            found.append(each)
            write_lines(sys.stdout, _line(each))
    failed = [each.name for each in found if each.verdict is Verdict.FAIL]
    if failed:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"{len(failed)} of {len(found)} checks failed: {', '.join(failed)}",
        )


def _results(
    address: str | None,
    admin: str | None,
    config_file: Path | None,
    model_dir: Path | None,
    drafter_dir: Path | None,
    timeout_s: float,
) -> Iterable[Result]:
    if address is None:
        from draftgate.cli.doctor.local import local_checks

        return local_checks(config_file, model_dir, drafter_dir, timeout_s)
    from draftgate.cli.doctor.running import look_at

    for name, given in (("ADDRESS", address), ("--admin", admin or address)):
        host, _, port = given.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise typer.BadParameter(f"{given!r} is no HOST:PORT", param_hint=name)
    return asyncio.run(look_at(address, admin or address, timeout_s))


def _line(result: Result) -> str:
    """Columns on a terminal; in a pipe a tab between two."""
    text = " ".join(clean(result.found).split())
    remedy = " ".join(clean(result.remedy).split())
    if not sys.stdout.isatty():
        return "\t".join((result.verdict, result.name, text, remedy))
    verdict = f"{result.verdict:<4}"
    if colour_wanted(sys.stdout):
        verdict = typer.style(verdict, fg=_COLOURS[result.verdict])
    return f"{verdict}  {result.name:<{_NAME_WIDTH}} {text}{f' → {remedy}' if remedy else ''}"
