"""The doctor's checks of the machine, each with something broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftgate.cli.doctor import machine
from draftgate.cli.doctor.result import Verdict

GIB = 2**30


def test_this_python_and_its_packages_are_right() -> None:
    assert machine.check_python().verdict is Verdict.OK
    found = machine.check_packages(
        "packages", machine.REQUIRED, machine.imported, remedy="", needed=True
    )
    assert found.verdict is Verdict.OK
    assert "grpcio 1." in found.found
    assert machine.check_numpy("1.26.4").verdict is Verdict.OK


def test_an_old_python_fails() -> None:
    found = machine.check_python((3, 10, 4))
    assert (found.verdict, found.remedy) == (Verdict.FAIL, "use Python 3.11 or later")
    assert found.found.startswith("3.10.4 at ")


@pytest.mark.parametrize(("needed", "verdict"), [(True, Verdict.FAIL), (False, Verdict.WARN)])
def test_a_missing_package_is_named(needed: bool, verdict: Verdict) -> None:
    modules = {"json": "pytest", "no_such_module": "no-such-package"}
    found = machine.check_packages(
        "some", modules, machine.installed, remedy="pip install it", needed=needed
    )
    assert (found.verdict, found.remedy) == (verdict, "pip install it")
    assert found.found == "missing or broken: no-such-package (not installed)"


def test_a_broken_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_on_purpose.py").write_text("raise RuntimeError('no such\\nlibrary')")
    monkeypatch.syspath_prepend(tmp_path)
    found = machine.check_packages(
        "some", {"broken_on_purpose": "broken"}, machine.imported, remedy="", needed=True
    )
    assert found.found == "missing or broken: broken (no such)"


def test_a_numpy_that_tritons_stub_cannot_take_fails() -> None:
    assert machine.check_numpy("2.1.0").verdict is Verdict.FAIL


def machine_with(
    root: Path, *, total: int, free: int, limit: str = "max", used: int = 0, quota: str = "max"
) -> Path:
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"
        "HugePages_Total: 0\n"
    )
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    return root


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ({"total": 8 * GIB, "free": 5 * GIB}, Verdict.OK),
        ({"total": 8 * GIB, "free": 3 * GIB}, Verdict.WARN),
        ({"total": 3 * GIB, "free": 3 * GIB}, Verdict.FAIL),
        ({"total": 8 * GIB, "free": 8 * GIB, "limit": str(3 * GIB)}, Verdict.FAIL),
        (
            {"total": 8 * GIB, "free": 8 * GIB, "limit": str(5 * GIB), "used": 2 * GIB},
            Verdict.WARN,
        ),
    ],
)
def test_memory_is_the_machines_or_the_containers(
    tmp_path: Path, memory: dict[str, int], verdict: Verdict
) -> None:
    found = machine.check_memory(4 * GIB, machine_with(tmp_path, **memory))  # type: ignore[arg-type]
    assert found.verdict is verdict
    assert "about 4.0 GiB needed" in found.found


def test_cores_are_the_machines_or_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = set(range(4))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: cores)
    sizes = {"total": GIB, "free": GIB}
    plenty = machine.check_cores(machine_with(tmp_path / "a", **sizes))
    assert (plenty.verdict, plenty.found) == (Verdict.OK, "4")
    capped = machine.check_cores(machine_with(tmp_path / "b", **sizes, quota="150000"))
    assert (capped.verdict, capped.found) == (Verdict.WARN, "4, of which the container may use 1.5")
    assert capped.remedy == "start the engine with --threads 1"
    cores = {0}
    assert machine.check_cores(tmp_path / "nowhere").verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(100, Verdict.FAIL), (1024, Verdict.WARN), (2000, Verdict.OK), (-1, Verdict.OK)],
)
def test_open_files_are_counted_for_the_connections_let_in(limit: int, verdict: Verdict) -> None:
    found = machine.check_open_files(1000, limit)
    assert found.verdict is verdict
    assert ("ulimit -n 1512" in found.remedy) == (verdict is not Verdict.OK)
