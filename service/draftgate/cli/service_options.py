"""Command-line options shared by the commands that serve.

Each is a setting too: what is given here goes before the environment, that before the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from draftgate.cli.options import DEFAULT_SERVER

__all__ = [
    "AdminListen",
    "ConfigFile",
    "Entry",
    "Grace",
    "Insecure",
    "Listen",
    "LogFormat",
    "LogLevel",
    "ModelName",
    "OtlpEndpoint",
    "settings_given",
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings of the gateway, YAML. The environment and options here go first. SIGHUP "
        "reads it again.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the gateway listens; port 0: any free.",
        show_default=DEFAULT_SERVER,
    ),
]
AdminListen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve operators here and nowhere else: AdminService, changes of the gate's policy.",
        show_default="beside all else",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen beyond loopback without TLS: the network is kept safe."
    ),
]
Entry = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The Triton model that generations are sent to: `ensemble`, or `engine`, for which "
        "the gateway makes the text itself.",
        show_default="the usual one that is there",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(help="What clients call the model.", show_default="the name of its folder"),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Send traces to this OTLP gRPC collector.",
        show_default="OTEL_EXPORTER_OTLP_ENDPOINT if set",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    typer.Option(
        help="Log this and worse on stderr: from info on every call and generation.",
        show_default="warning",
    ),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(help="Log lines to read, or one JSON object a line.", show_default="text"),
]
Grace = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="How long streams may finish at the end.",
        show_default="10",
    ),
]


def settings_given(*, insecure: bool, **options: object) -> dict[str, object]:
    """The options as settings, as far as they were given. options: by the settings' names."""
    flags = {key: value for key, value in options.items() if value is not None}
    if insecure:
        flags["security"] = {"insecure": True}
    return flags
