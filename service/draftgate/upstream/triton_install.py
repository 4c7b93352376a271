"""Where the parts of a runnable tritonserver lie, and how they are put together.

The `nvidia-pytriton` package ships the server, its Python backend, and one stub (the program that
runs a Python model) per Python version. The stub links to a shared libpython, which the package
does not ship.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import draftgate
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["Installation", "find_installation", "lay_out", "server_environment"]

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBPYTHON = f"libpython{_PYTHON}.so.1.0"


@dataclass(frozen=True)
class Installation:
    """The parts, all of them existing files and folders."""

    server: Path
    """The tritonserver program."""
    libraries: Path
    """The folder of the shared libraries that it links to."""
    python_backend: Path
    """The folder of the Python backend, without a stub."""
    stub: Path
    """The stub for the running Python."""
    libpython: Path
    """The shared libpython that the stub links to."""


def find_installation() -> Installation:
    """Find the parts without importing the package that ships them.

    Raises DraftgateError(FAILED_PRECONDITION) saying what to install.
    """
    try:
        site = Path(str(distribution("nvidia-pytriton").locate_file("")))
    except PackageNotFoundError as error:
        raise _missing(
            "the package nvidia-pytriton", "pip install --no-deps nvidia-pytriton"
        ) from (error)
    root = site / "pytriton" / "tritonserver"
    installation = Installation(
        server=root / "bin" / "tritonserver",
        libraries=site / "nvidia_pytriton.libs",
        python_backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub",
        libpython=_find_libpython(),
    )
    for part in (installation.server, installation.libraries, installation.python_backend):
        if not part.exists():
            raise _missing(str(part), "pip install --force-reinstall --no-deps nvidia-pytriton")
    if not installation.stub.exists():
        raise _missing(
            f"a Triton stub for Python {_PYTHON}",
            "use one of the Python versions in " + str(installation.stub.parents[1]),
        )
    return installation


def lay_out(installation: Installation, state_dir: Path) -> None:
    """Fill an empty folder with what the server is started on: `backends/` and `lib/`.

    Raises OSError if the folder cannot be written.
    """
    backend = state_dir / "backends" / "python"
    libraries = state_dir / "lib"
    backend.mkdir(parents=True)
    libraries.mkdir()
    for part in installation.python_backend.iterdir():
        if part.is_file():
            (backend / part.name).symlink_to(part)
    (backend / installation.stub.name).symlink_to(installation.stub)
    # Alone in its folder, so that nothing beside it gets in the way of the server's libraries.
    (libraries / _LIBPYTHON).symlink_to(installation.libpython)


def server_environment(installation: Installation, state_dir: Path) -> dict[str, str]:
    """This process's environment, with what the server and its stubs need.

    The stub is an isolated interpreter: it takes its standard library and site-packages from the
    `python3` found on PATH and ignores PYTHONPATH; the model files read DRAFTGATE_PYTHONPATH.
    """
    packages = [
        str(Path(draftgate.__file__).parents[1]),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    libraries = [str(state_dir / "lib"), str(installation.libraries)]
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ),
        "DRAFTGATE_PYTHONPATH": os.pathsep.join(dict.fromkeys(packages)),
    }


def _find_libpython() -> Path:
    for folder in _library_folders():
        if (folder / _LIBPYTHON).exists():
            return folder / _LIBPYTHON
    known = _loader_cache().get(_LIBPYTHON)
    if known is not None and known.exists():
        return known
    raise _missing(
        _LIBPYTHON,
        f"apt-get install libpython{_PYTHON}, or use a Python built with --enable-shared",
    )


def _library_folders() -> Iterator[Path]:
    """Where an interpreter keeps its own shared library."""
    configured = sysconfig.get_config_var("LIBDIR")
    if configured:
        yield Path(configured)
    yield Path(sys.base_prefix, "lib")
    yield Path(sys.executable).resolve().parent
    yield Path(sys.executable).resolve().parents[1] / "lib"


def _loader_cache() -> dict[str, Path]:
    """Where the dynamic loader would find each library, by name."""
    try:
        listing = subprocess.run(
            ["ldconfig", "-p"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": os.environ.get("PATH", "") + ":/sbin:/usr/sbin"},
        ).stdout
    except FileNotFoundError:
        return {}
    found: dict[str, Path] = {}
    for line in listing.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            found.setdefault(name.split(" ", 1)[0], Path(path))
    return found


def _missing(what: str, remedy: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{what} is missing: {remedy}")
