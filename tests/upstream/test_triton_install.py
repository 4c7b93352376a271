from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream import triton_install
from draftgate.upstream.triton_install import find_installation, lay_out, server_environment


def test_finds_every_part() -> None:
    found = find_installation()
    assert os.access(found.server, os.X_OK)
    assert os.access(found.stub, os.X_OK)
    assert found.libraries.is_dir()
    assert (found.python_backend / "libtriton_python.so").is_file()
    assert found.libpython.is_file()


def refused() -> str:
    with pytest.raises(DraftgateError) as caught:
        find_installation()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_missing_libpython_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install, "_LIBPYTHON", "libpython9.9.so.1.0")
    assert refused().startswith("libpython9.9.so.1.0 is missing: apt-get install libpython3.")


def test_libpython_known_to_the_loader_alone_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for a static interpreter beside a system library."""
    library = tmp_path / "libpython9.9.so.1.0"
    library.touch()
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text(
        f'#!/bin/sh\necho "2 libs found"\necho "\t{library.name} (libc6,x86-64) => {library}"\n'
    )
    ldconfig.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_install, "_LIBPYTHON", library.name)
    assert find_installation().libpython == library


def test_no_ldconfig_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install, "_LIBPYTHON", "libpython9.9.so.1.0")

    def run(*arguments: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(triton_install.subprocess, "run", run)
    assert "is missing" in refused()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(triton_install, "distribution", find)
    assert refused() == (
        "the package nvidia-pytriton is missing: pip install --no-deps nvidia-pytriton"
    )


def test_a_broken_package_names_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    other = distribution("pytest")
    monkeypatch.setattr(triton_install, "distribution", lambda name: other)
    monkeypatch.setattr(other, "locate_file", lambda path: Path("/nowhere"), raising=False)
    assert refused().startswith("/nowhere/pytriton/tritonserver/bin/tritonserver is missing")


def test_a_python_without_stub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install, "_PYTHON", "9.9")
    assert "a Triton stub for Python 9.9 is missing" in refused()


def test_lays_out_links_and_their_environment(tmp_path: Path) -> None:
    installation = find_installation()
    lay_out(installation, tmp_path)
    backend = tmp_path / "backends" / "python"
    assert {path.name for path in backend.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert all(path.resolve().is_file() for path in backend.iterdir())
    libraries = server_environment(installation, tmp_path)["LD_LIBRARY_PATH"].split(os.pathsep)
    assert [path.name for path in Path(libraries[0]).iterdir()] == [installation.libpython.name]
    assert libraries[1] == str(installation.libraries)
