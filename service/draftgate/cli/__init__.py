"""The `draftgate` command.

Exit codes: 0 done; 1 failed, with one line on stderr that says why; 2 wrong usage; 130 interrupted;
141 the reader of our output went away.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

# gRPC's core, which reads this when it is imported, tells stderr about every connection that ends;
# our own line says it once.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from draftgate import __version__
from draftgate.cli import chat, gateway, generate, serve, top
from draftgate.cli.config import config_app
from draftgate.cli.doctor import command as doctor_command
from draftgate.cli.gate import gate_app
from draftgate.cli.keys import keys_app
from draftgate.cli.model import model_app
from draftgate.cli.preparation import PreparationFailedError
from draftgate.cli.render import ReaderGoneError, print_error
from draftgate.errors import DraftgateError

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_READER_GONE = 141  # 128 + SIGPIPE, what a shell reports for a program killed by it

app = typer.Typer(
    name="draftgate",
    help="Serve a language model with speculative decoding, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(gateway.gateway)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(top.top)
app.command()(doctor_command.doctor)
app.add_typer(model_app, name="model")
app.add_typer(gate_app, name="gate")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character shows a question mark; the answer goes on.
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="draftgate")
    except DraftgateError as error:
        print_error(error.message)
        sys.exit(EXIT_FAILED)
    except PreparationFailedError:
        sys.exit(EXIT_FAILED)
    except ReaderGoneError:
        sys.exit(EXIT_READER_GONE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftgate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Serve a language model with speculative decoding, and talk to it."""
