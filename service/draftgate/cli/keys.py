"""`draftgate keys`: API keys for tenants."""

from __future__ import annotations

import re
from typing import Annotated

import typer

__all__ = ["keys_app"]

keys_app = typer.Typer(help="API keys for tenants.", no_args_is_help=True)


@keys_app.callback()
def _keys() -> None:
    """API keys for tenants."""


@keys_app.command()
def new(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose key it is.")],
) -> None:
    """Make a key: shown once, with what belongs into the file of tenants."""
    from draftgate.gateway.auth import new_key
    from draftgate.gateway.tenant import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, tenant):
        allowed = "1 to 128 letters, digits and . _ : @ / -"
        raise typer.BadParameter(f"{tenant!r} is no name: {allowed}", param_hint="--tenant")
    key, kept = new_key()
    typer.echo(
        f"# The key, for its owner only. It is kept nowhere: {key}\n"
        "# For the file of tenants:\n"
        "tenants:\n"
        f'  "{tenant}":\n'
        "    keys:\n"
        f'      - {{id: "{kept.id}", sha256: "{kept.sha256}"}}'
    )
