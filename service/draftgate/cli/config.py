"""`draftgate config`: what the settings are, and whether they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftgate.errors import invalid_argument

__all__ = ["config_app"]

config_app = typer.Typer(help="Check and show the service's settings.", no_args_is_help=True)


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of settings.")],
) -> None:
    """Say what is wrong with a file of settings, the environment, or the files that they name."""
    from draftgate.config import load
    from draftgate.gateway.auth import Authenticator, ServerCertificates
    from draftgate.gateway.listen import check_address
    from draftgate.upstream.addresses import parse_addresses

    settings = load(file).settings
    secured = settings.security.tls is not None or settings.security.insecure
    for listen in filter(None, (settings.listen, settings.admin_listen)):
        check_address(listen, secured=secured)
    if settings.listen == settings.admin_listen and not settings.listen.endswith(":0"):
        raise invalid_argument("admin_listen", settings.admin_listen, "another port than listen's")
    if settings.triton is not None:
        parse_addresses(settings.triton, field="triton")
    if settings.tokenizer_dir is not None:
        settings.defaults.completed(settings.tokenizer_dir)
    security = settings.security
    if security.tls:
        ServerCertificates(security.tls)
    if security.tenants_file:
        Authenticator(security)
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
