"""The checks of this machine, in the order in which a start would need what they look at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from draftgate.cli.checkout import checkout, packaged_checkpoint, shipped_drafter
from draftgate.cli.doctor import machine
from draftgate.cli.doctor.access import (
    check_certificates,
    check_listener,
    check_settings,
    check_tenants,
)
from draftgate.cli.doctor.parts import check_drafter, check_model, check_triton, memory_needed
from draftgate.cli.doctor.result import Result
from draftgate.cli.doctor.upstreams import check_upstreams
from draftgate.config import Settings

__all__ = ["local_checks"]

_GATEWAY_BYTES = 1 << 29
"""What a gateway without an engine takes."""


def local_checks(
    config_file: Path | None, model_dir: Path | None, drafter_dir: Path | None, timeout_s: float
) -> Iterator[Result]:
    """Settings that name Tritons are those of `draftgate gateway`, others those of `serve`."""
    settings, result = check_settings(config_file)
    yield result
    yield machine.check_python()
    yield machine.check_packages(
        "packages",
        machine.REQUIRED,
        machine.imported,
        remedy="pip install --upgrade draftgate",
        needed=True,
    )
    yield machine.check_cores()
    if settings is None:
        return
    if settings.triton is None:
        yield from _of_serve(model_dir, drafter_dir)
    else:
        yield machine.check_memory(_GATEWAY_BYTES)
        yield from asyncio.run(check_upstreams(settings, timeout_s))
    yield from _of_gateway(settings)


def _of_serve(model_dir: Path | None, drafter_dir: Path | None) -> Iterator[Result]:
    """What the engine and its Triton need."""
    folder = model_dir or packaged_checkpoint(checkout() / "models")
    if drafter_dir is None and model_dir is None:
        drafter_dir = shipped_drafter()
    yield machine.check_numpy(version("numpy"))
    yield machine.check_packages(
        "engine",
        machine.ENGINE,
        machine.imported,
        remedy="pip install 'draftgate[engine]'",
        needed=True,
    )
    yield machine.check_packages(
        "preparing",
        machine.PREPARE,
        machine.installed,
        remedy="pip install 'draftgate[prepare]', unless checkpoints are prepared elsewhere",
        needed=False,
    )
    yield check_triton()
    yield check_model(folder, made_by_serve=model_dir is None)
    yield machine.check_memory(memory_needed(folder))
    if drafter_dir is not None and (folder / "config.json").is_file():
        yield check_drafter(drafter_dir, folder)


def _of_gateway(settings: Settings) -> Iterator[Result]:
    """What everybody who listens needs."""
    security = settings.security
    yield check_listener("listen", settings.listen, security)
    if settings.admin_listen is not None:
        yield check_listener("admin listen", settings.admin_listen, security)
    yield machine.check_open_files(security.limits.max_connections)
    yield check_certificates(security.tls)
    yield check_tenants(security)
