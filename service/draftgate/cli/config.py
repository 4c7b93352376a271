"""`draftgate config`: what the settings are, and whether they can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from draftgate.cli.render import print_error

__all__ = ["config_app"]

config_app = typer.Typer(help="Check and show the service's settings.", no_args_is_help=True)


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of settings.")],
) -> None:
    """Say what is wrong with a file of settings, the environment, or the files that they name: all
    of it, a line each."""
    from draftgate.config import examine, gateway_config
    from draftgate.gateway.problems import config_problems

    found = examine(file)
    problems = list(found.problems)
    if found.settings is not None:
        settings = found.settings
        config = gateway_config(
            settings,
            triton_target=settings.triton or "",
            model_name=settings.model_name or "",
            tokenizer_dir=settings.tokenizer_dir,
        )
        if "security" in found.left_out:
            # What was left out may be what makes the address safe.
            config = replace(config, security=replace(config.security, insecure=True))
        problems += config_problems(config)
    for each in problems:
        print_error(each.message)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{file}: nothing wrong")


@config_app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A YAML file of settings."),
    ] = None,
) -> None:
    """List every setting with its value and where that comes from."""
    from draftgate.config import load

    for key, value, source in load(file).lines():
        typer.echo(f"{key}\t{value}\t{source}")
