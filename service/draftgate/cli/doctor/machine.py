"""Checks of this machine: interpreter, packages, cores, memory, open files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from draftgate.cli.doctor.result import Result, fail, ok, warn

__all__ = [
    "ENGINE",
    "PREPARE",
    "REQUIRED",
    "check_cores",
    "check_memory",
    "check_numpy",
    "check_open_files",
    "check_packages",
    "check_python",
    "imported",
    "installed",
]

REQUIRED = {
    "cryptography": "cryptography",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "jinja2": "jinja2",
    "jwt": "PyJWT",
    "numpy": "numpy",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "prompt_toolkit": "prompt_toolkit",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "rich": "rich",
    "tokenizers": "tokenizers",
    "typer": "typer",
    "uvloop": "uvloop",
    "yaml": "PyYAML",
}
"""What every command may need: the module, and the package that has it."""

ENGINE = {"safetensors": "safetensors", "torch": "torch"}
"""What the embedded engine needs."""

PREPARE = {
    "accelerate": "accelerate",
    "gguf": "gguf",
    "modelopt": "nvidia-modelopt",
    "transformers": "transformers",
}
"""What preparing a checkpoint needs."""

_OLDEST_PYTHON = (3, 11)
_NUMPY_BELOW = 2
"""The Python stub of tritonserver 2.51 was built for NumPy 1."""

_FEW_FILES = 256
_SPARE_FILES = 512
"""For Triton, replicas, files and the libraries themselves."""


def check_python(found: tuple[int, ...] = sys.version_info[:3]) -> Result:
    shown = f"{'.'.join(map(str, found))} at {sys.executable}"
    if found < _OLDEST_PYTHON:
        return fail("python", shown, "use Python 3.11 or later")
    return ok("python", shown)


def imported(module: str) -> None:
    """Raises ImportError, or whatever a broken package raises, if it cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)


def installed(module: str) -> None:
    """Raises ImportError if it is not there. Imports nothing: some take long."""
    if importlib.util.find_spec(module) is None:
        raise ImportError("not installed")


def check_packages(
    name: str, modules: Mapping[str, str], look: Callable[[str], None], *, remedy: str, needed: bool
) -> Result:
    """modules: with the packages that have them. needed: whether nothing works without."""
    found, missing = [], []
    for module, package in modules.items():
        try:
            look(module)
        except Exception as error:  # noqa: BLE001 - a package may break in any way
            first_line = str(error).partition("\n")[0] or type(error).__name__
            missing.append(f"{package} ({first_line})")
        else:
            found.append(f"{package} {_version(package)}")
    if not missing:
        return ok(name, ", ".join(found))
    shown = f"missing or broken: {', '.join(missing)}"
    return fail(name, shown, remedy) if needed else warn(name, shown, remedy)


def check_numpy(found: str) -> Result:
    """found: its version."""
    if int(found.partition(".")[0]) >= _NUMPY_BELOW:
        return fail("numpy", f"{found}, Triton's stub is built for 1", "pip install 'numpy<2'")
    return ok("numpy", found)


def check_cores(root: Path = Path("/")) -> Result:
    """Cores that this process may use, and the share of them that its container has.

    root: of the file systems that tell.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root / "sys/fs/cgroup/cpu.max")
    if quota is not None and quota < cores:
        return warn(
            "cores",
            f"{cores}, of which the container may use {quota:g}",
            f"start the engine with --threads {max(1, int(quota))}",
        )
    if cores < 2:
        return warn("cores", "1", "the gateway and the engine will wait for each other: give it 2")
    return ok("cores", str(cores))


def check_memory(needed_bytes: int, root: Path = Path("/")) -> Result:
    """root: of the file systems that tell."""
    total, free = _memory(root)
    shown = f"{_gib(free)} free of {_gib(total)}, about {_gib(needed_bytes)} needed"
    if total < needed_bytes:
        return fail("memory", shown, "serve a smaller model, or lower --kv-cache-mib")
    if free < needed_bytes:
        return warn("memory", shown, "stop what else runs here, or lower --kv-cache-mib")
    return ok("memory", shown)


def check_open_files(connections: int, limit: int | None = None) -> Result:
    """connections: that the server lets in. limit: of open files; None takes this process's."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    needed = connections + _SPARE_FILES
    shown = f"{limit:,} allowed, security.limits.max_connections is {connections:,}"
    remedy = f"ulimit -n {needed}, or a lower security.limits.max_connections"
    if limit < _FEW_FILES:
        return fail("open files", shown, remedy)
    return ok("open files", shown) if limit >= needed else warn("open files", shown, remedy)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _cpu_quota(path: Path) -> float | None:
    """Cores' worth of time that the control group may use."""
    quota, _, period = _content(path).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _memory(root: Path) -> tuple[int, int]:
    """All memory, and what of it is free, in bytes: the machine's, or less in a container."""
    sizes = {}
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    limit, used = (
        _content(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current")
    )
    if limit.isdecimal() and used.isdecimal():
        total, free = min(total, int(limit)), min(free, int(limit) - int(used))
    return total, free


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
