"""`draftgate gateway`: the gateway alone, in front of Tritons that somebody else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgate.cli import service_options
from draftgate.cli.heap import freeze_heap
from draftgate.cli.logs import log_to_stderr
from draftgate.cli.render import say
from draftgate.cli.stop import Stop
from draftgate.errors import DraftgateError, ErrorCode

if TYPE_CHECKING:
    from draftgate.config import Settings
    from draftgate.gateway import Gateway, GatewayConfig
    from draftgate.gateway.workers import Fleet

__all__ = ["gateway"]


def gateway(
    config_file: service_options.ConfigFile = None,
    triton: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A Triton to use, repeatable; dns:///NAME:PORT uses one at each address of a "
            "name.",
            show_default="`triton` of the settings",
        ),
    ] = None,
    listen: service_options.Listen = None,
    insecure: service_options.Insecure = False,
    admin_listen: service_options.AdminListen = None,
    entry: service_options.Entry = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with the model's tokenizer: with it generations of text survive the "
            "loss of their Triton half-way, clients may ask for the text of single tokens, and "
            "conversations work with models that take text alone.",
            show_default="`tokenizer_dir` of the settings",
        ),
    ] = None,
    model_name: service_options.ModelName = None,
    otlp_endpoint: service_options.OtlpEndpoint = None,
    grace: service_options.Grace = None,
    log_level: service_options.LogLevel = None,
    log_format: service_options.LogFormat = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Processes that serve, each on one core; what runs at once is decided for all of "
            "them together.",
            show_default="1",
        ),
    ] = None,
) -> None:
    """Serve in front of Tritons that run elsewhere, with Draftgate's models loaded.

    Ctrl-C or SIGTERM lets running streams finish and exits with 0. A second one ends everything at
    once.
    """
    # Only a command that serves needs the gateway; others start faster without it.
    import uvloop

    from draftgate.config import load

    flags = service_options.settings_given(
        insecure=insecure,
        triton=",".join(triton) if triton else None,
        listen=listen,
        admin_listen=admin_listen,
        entry=entry,
        tokenizer_dir=model_dir,
        model_name=model_name,
        otlp_endpoint=otlp_endpoint,
        grace_s=grace,
        log_level=log_level,
        log_format=log_format,
        workers=workers,
    )
    settings = load(config_file, flags).settings
    config = _config(settings)
    reread = (lambda: load(config_file, flags).settings) if config_file else None
    log_to_stderr(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_until_stopped(config, settings, reread))


def _config(settings: Settings) -> GatewayConfig:
    """Raises DraftgateError if the settings lack what `serve` would know by itself."""
    from draftgate.config import gateway_config

    if not settings.triton:
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT, "--triton, or triton in the settings, is needed"
        )
    folder = settings.tokenizer_dir
    name = settings.model_name or (folder.resolve().name if folder else "")
    if not name:
        raise DraftgateError(ErrorCode.INVALID_ARGUMENT, "--model-name or --model-dir is needed")
    return gateway_config(
        settings, triton_target=settings.triton, model_name=name, tokenizer_dir=folder
    )


async def _run_until_stopped(
    config: GatewayConfig, settings: Settings, reread: Callable[[], Settings] | None
) -> None:
    from draftgate.cli.reloading import Reloading

    stop = Stop()
    reloading = Reloading(settings, reread)
    with stop.on_signals(), reloading.on_signal():
        running = _gateway(config, settings)
        await stop.run(running.start())
        if stop.forced.is_set():
            return
        reloading.gateway = running
        freeze_heap()
        say(f"gateway on {running.address}, Triton on {config.triton_target}")
        if running.admin_address:
            say(f"operators on {running.admin_address}")
        say("Ctrl-C stops")
        await stop.requested.wait()
        say("stopping; once more ends everything at once")
        await stop.run(running.drain(settings.grace_s))


def _gateway(config: GatewayConfig, settings: Settings) -> Gateway | Fleet:
    from draftgate.cli import worker
    from draftgate.gateway import Gateway
    from draftgate.gateway.workers import Fleet

    if settings.workers == 1:
        return Gateway(config)
    log_settings = {"level": settings.log_level, "format": settings.log_format}
    return Fleet(config, settings.workers, worker.COMMAND, log_settings=log_settings)
