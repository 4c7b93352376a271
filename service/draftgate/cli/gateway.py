"""`draftgate gateway`: the gateway alone, in front of Tritons that somebody else runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgate.cli import options
from draftgate.cli.logs import log_to_stderr
from draftgate.cli.render import say
from draftgate.cli.stop import Stop
from draftgate.errors import DraftgateError, ErrorCode

if TYPE_CHECKING:
    from draftgate.gateway import GatewayConfig

__all__ = ["gateway"]


def gateway(
    triton: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="A Triton to use, repeatable; dns:///NAME:PORT uses one at each address of a "
            "name.",
        ),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the gateway listens; port 0: any free.")
    ] = options.DEFAULT_SERVER,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with the model's tokenizer: with it generations of text survive the "
            "loss of their Triton half-way, and clients may ask for the text of single tokens.",
            show_default=False,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model.", show_default="the name of the folder --model-dir"
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Send traces to this OTLP gRPC collector.",
            show_default="OTEL_EXPORTER_OTLP_ENDPOINT if set",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="How long streams may finish at the end."),
    ] = 10.0,
) -> None:
    """Serve in front of Tritons that run elsewhere, with Draftgate's models loaded.

    Ctrl-C or SIGTERM lets running streams finish and exits with 0. A second one ends everything at
    once.
    """
    # Only a command that serves needs the gateway; others start faster without it.
    import uvloop

    from draftgate.gateway import GatewayConfig

    name = model_name or (model_dir.resolve().name if model_dir else "")
    if not name:
        raise DraftgateError(ErrorCode.INVALID_ARGUMENT, "--model-name or --model-dir is needed")
    config = GatewayConfig(
        triton_target=",".join(triton),
        model_name=name,
        listen=listen,
        tokenizer_dir=model_dir,
        otlp_endpoint=otlp_endpoint,
    )
    log_to_stderr("warning", "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_until_stopped(config, grace))


async def _run_until_stopped(config: GatewayConfig, grace_s: float) -> None:
    from draftgate.gateway import Gateway

    stop = Stop()
    with stop.on_signals():
        running = Gateway(config)
        await running.start()
        address = f"{config.listen.rpartition(':')[0]}:{running.port}"
        say(f"gateway on {address}, Triton on {config.triton_target}")
        say("Ctrl-C stops")
        await stop.requested.wait()
        say("stopping; once more ends everything at once")
        await stop.run(running.drain(grace_s))
