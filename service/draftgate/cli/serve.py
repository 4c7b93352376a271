"""`draftgate serve`: the whole service, from a model file to streaming tokens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftgate.cli import service_options
from draftgate.cli.checkout import checkout, packaged_checkpoint, shipped_drafter
from draftgate.cli.logs import log_to_stderr
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.speculation import CostTable

if TYPE_CHECKING:
    from draftgate.config import Settings

__all__ = ["serve"]

_MIB = 1 << 20
_ENGINE = "Engine"
_TRITON = "Triton"


class Dtype(StrEnum):
    """What the engine can compute in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class GateName(StrEnum):
    """Who can decide the draft length."""

    AUTO = "auto"
    FIXED = "fixed"


class DrafterName(StrEnum):
    """Who can draft. The engine knows them by the same names."""

    HYBRID = "hybrid"
    EAGLE = "eagle"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft-model"
    MEDUSA = "medusa"
    NONE = "none"


def serve(
    config_file: service_options.ConfigFile = None,
    listen: service_options.Listen = None,
    insecure: service_options.Insecure = False,
    admin_listen: service_options.AdminListen = None,
    entry: service_options.Entry = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The checkpoint to serve; with --from, where to prepare it.",
            show_default="the packaged model's, in models/ beside the model repository",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Prepare the checkpoint from this GGUF file or Hugging Face folder first.",
            show_default="the packaged model, unless --model-dir is given",
        ),
    ] = None,
    model_name: service_options.ModelName = None,
    otlp_endpoint: service_options.OtlpEndpoint = None,
    grace: service_options.Grace = None,
    log_level: service_options.LogLevel = None,
    log_format: service_options.LogFormat = None,
    gate: Annotated[
        GateName,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="Who decides the draft length: auto by load, after measuring once what steps "
            "cost here (10 s); fixed takes --draft-len.",
        ),
    ] = GateName.AUTO,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_ENGINE,
            help="What steps cost, for --gate auto to start from.",
            show_default="measured here, at the first start",
        ),
    ] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_ENGINE,
            help="Where `draftgate gate set --save` keeps the gate's policy.",
            show_default="one for each checkpoint, in XDG_STATE_HOME/draftgate",
        ),
    ] = None,
    draft_len: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            rich_help_panel=_ENGINE,
            help="Longest draft, with --gate fixed the only one; 0 never speculates.",
            show_default="the engine's",
        ),
    ] = None,
    draft_width: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            rich_help_panel=_ENGINE,
            help="Most tokens that an EAGLE drafter lets follow one: above 1 it drafts trees.",
            show_default="the engine's",
        ),
    ] = None,
    drafter: Annotated[
        DrafterName | None,
        typer.Option(
            rich_help_panel=_ENGINE,
            help="Who drafts.",
            show_default="hybrid with --drafter-dir and for the packaged model, else ngram",
        ),
    ] = None,
    drafter_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_ENGINE,
            help="The drafter's weights, for a drafter that has any.",
            show_default="for the packaged model, the EAGLE-3 head in drafters/ of the checkout",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            rich_help_panel=_ENGINE, help="What to compute in.", show_default="the engine's"
        ),
    ] = None,
    max_batch_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            rich_help_panel=_ENGINE,
            help="Most generations in one step.",
            show_default="the engine's",
        ),
    ] = None,
    max_sequence_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=2**24,
            rich_help_panel=_ENGINE,
            help="Longest prompt plus output.",
            show_default="the model's",
        ),
    ] = None,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_ENGINE,
            help="Memory of the KV cache in MiB.",
            show_default="the engine's",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, rich_help_panel=_ENGINE, help="CPU threads.", show_default="every core"
        ),
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_TRITON,
            help="Triton's model repository.",
            show_default="model_repository of the checkout",
        ),
    ] = None,
    triton_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            rich_help_panel=_TRITON,
            help="Where Triton listens on 127.0.0.1, for clients that speak its own protocol.",
            show_default="any free port",
        ),
    ] = None,
) -> None:
    """Prepare the model once, start Triton and the gateway, and stay up.

    Ctrl-C or SIGTERM lets running streams finish and exits with 0; before the service is ready it
    exits with 130. A second one ends everything at once.
    """
    # Only this command needs the gateway; `draftgate generate` starts faster without it.
    import uvloop

    from draftgate.cli.lifecycle import ServeConfig, run_until_stopped
    from draftgate.config import load
    from draftgate.upstream.triton_log import ENGINE_LOG

    flags = service_options.settings_given(
        insecure=insecure,
        listen=listen,
        admin_listen=admin_listen,
        entry=entry,
        model_name=model_name,
        otlp_endpoint=otlp_endpoint,
        grace_s=grace,
        log_level=log_level,
        log_format=log_format,
    )
    gateway_settings = load(config_file, flags).settings
    _check_settings(gateway_settings)
    repository = _model_repository(model_repository)
    packaged = source is None and model_dir is None
    source, checkpoint = _checkpoint(source, model_dir, repository)
    settings = {
        **_drafter(drafter, drafter_dir, packaged=packaged),
        "gate": gate.value,
        "costs_file": _costs_file(costs),
        "policy_file": _policy_file(policy_file, checkpoint),
        "draft_len": draft_len,
        "draft_width": draft_width,
        "dtype": None if dtype is None else dtype.value,
        "max_batch_rows": max_batch_rows,
        "max_sequence_tokens": max_sequence_tokens,
        "kv_cache_bytes": None if kv_cache_mib is None else kv_cache_mib * _MIB,
        "threads": threads,
    }
    config = ServeConfig(
        settings=gateway_settings,
        model_repository=repository,
        model_dir=checkpoint,
        source=source,
        engine_settings={name: value for name, value in settings.items() if value is not None},
        triton_port=triton_port,
        reread=(lambda: load(config_file, flags).settings) if config_file else None,
    )
    log_to_stderr(gateway_settings.log_level, gateway_settings.log_format)
    logging.getLogger(ENGINE_LOG).setLevel(logging.INFO)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise typer.Exit(runner.run(run_until_stopped(config)))


def _check_settings(settings: Settings) -> None:
    """Raises DraftgateError for one that means another gateway."""
    for key in ("triton", "tokenizer_dir"):
        if getattr(settings, key) is not None:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{key}: it is for `draftgate gateway`; `draftgate serve` starts a Triton itself",
            )
    if settings.workers > 1:
        allowed = "1; `draftgate gateway` serves with several"
        raise invalid_argument("workers", settings.workers, allowed)


def _model_repository(given: Path | None) -> Path:
    """Where Triton's models are. Raises DraftgateError(NOT_FOUND) if nowhere."""
    if given is not None:
        if not given.is_dir():
            raise DraftgateError(ErrorCode.NOT_FOUND, f"{given} is no folder: --model-repository")
        return given
    found = checkout() / "model_repository"
    if not found.is_dir():
        raise DraftgateError(
            ErrorCode.NOT_FOUND,
            f"there is no model repository at {found}: install Draftgate from a checkout "
            "with `pip install -e`, or name the folder with --model-repository",
        )
    return found


def _drafter(
    name: DrafterName | None, folder: Path | None, *, packaged: bool
) -> dict[str, str | None]:
    """The engine's settings for who drafts; None leaves one to the engine.

    packaged: whether the packaged model is served. Raises DraftgateError when the weights that the
    drafter needs are named nowhere or not there.
    """
    shipped = shipped_drafter()
    if name is None and (folder is not None or (packaged and shipped.is_dir())):
        name = DrafterName.HYBRID
    if name in (None, DrafterName.NGRAM, DrafterName.NONE):
        if folder is not None:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT, f"--drafter-dir: --drafter {name} has no weights"
            )
        return {"drafter": name}
    if folder is None and packaged and name in (DrafterName.HYBRID, DrafterName.EAGLE):
        folder = shipped
    if folder is None:
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT, f"--drafter {name} needs --drafter-dir, its weights"
        )
    if not (folder / "config.json").is_file():
        raise DraftgateError(
            ErrorCode.NOT_FOUND, f"--drafter-dir: {folder} holds no drafter (no config.json)"
        )
    return {"drafter": name, "drafter_dir": str(folder.absolute())}


def _policy_file(given: Path | None, checkpoint: Path) -> str | None:
    """Where the engine keeps the gate's policy; None where the user has no folder for such."""
    if given is not None:
        return str(given.absolute())
    folder = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.expanduser("~/.local/state")
    if not os.path.isabs(folder):
        return None
    # Checkpoints of one name may lie in several places.
    path = checkpoint.resolve()
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return str(Path(folder, "draftgate", f"{path.name}-{key}.policy.json"))


def _costs_file(path: Path | None) -> str | None:
    """Raises DraftgateError when it is no table of step times."""
    if path is None:
        return None
    CostTable.load(path)
    return str(path.absolute())


def _checkpoint(
    source: Path | None, model_dir: Path | None, repository: Path
) -> tuple[Path | None, Path]:
    """What to prepare, or None to serve a folder as it is; and the folder.

    Raises DraftgateError if one of them is missing.
    """
    models = repository.absolute().parent / "models"
    if source is not None:
        return source, model_dir or models / f"{source.stem.lower()}-fp8"
    if model_dir is None:
        from draftgate.checkpoint import packaged_source

        return packaged_source(), packaged_checkpoint(models)
    from draftgate.checkpoint import check_checkpoint

    check_checkpoint(model_dir)
    return None, model_dir
