"""Dependencies point one way: who may import whom, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import draftgate

PACKAGE = Path(draftgate.__path__[0])

EVERYONE = {"errors", "contract", "sampling", "jsonfile", "totals", "yamlfile"}
"""Leaves that anyone may import."""

ALLOWED = {
    "errors": set(),
    "contract": set(),
    "sampling": {"errors"},
    "jsonfile": {"errors"},
    "totals": set(),
    "yamlfile": {"errors"},
    "text": EVERYONE,
    "speculation": EVERYONE,
    "checkpoint": EVERYONE,
    "telemetry": EVERYONE,
    "engine": EVERYONE | {"speculation", "checkpoint"},
    # What Triton's Python backend runs.
    "backend": EVERYONE | {"engine", "speculation", "text"},
    # `backend` for the names of the variables through which it configures the models.
    "upstream": EVERYONE | {"_pb", "backend", "text"},
    # `speculation` for the words of a policy.
    "gateway": EVERYONE | {"_pb", "upstream", "speculation", "telemetry", "text"},
    "config": EVERYONE | {"gateway"},
    # It runs on other machines than the server: nothing of that is any use to it.
    "client": EVERYONE | {"_pb", "telemetry"},
    # `speculation` for what it reckons without a server.
    # `telemetry` for the form of the logs.
    "cli": EVERYONE
    | {"_pb", "client", "config", "gateway", "upstream", "telemetry"}
    | {"engine", "checkpoint", "speculation"},
}

LIBRARIES = {
    "grpc": {"cli", "client", "gateway", "upstream"},
    "jwt": {"gateway"},
    "grpc_health": {"cli", "client", "gateway", "upstream"},
    "matplotlib": {"cli"},
    "opentelemetry": {"telemetry"},
    "torch": {"engine", "checkpoint", "cli"},
    "transformers": {"checkpoint"},
    "typer": {"cli"},
}
"""Libraries that only some areas may know."""


def imports() -> Iterator[tuple[str, str, str]]:
    """Every import in the package: the file, its area, the full name imported."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        area = file.parts[0].removesuffix(".py")
        if area in ("_pb", "__init__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield str(file), area, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: imports are absolute"
                for alias in node.names:
                    yield str(file), area, f"{node.module}.{alias.name}"


def test_every_area_has_its_arrows() -> None:
    assert {area for _, area, _ in imports()} <= set(ALLOWED)


def test_areas_import_only_what_they_may() -> None:
    wrong = [
        f"{file} imports {name}"
        for file, area, name in imports()
        if name.startswith("draftgate.")
        and name.split(".")[1] not in ALLOWED[area] | {area, "__version__"}
    ]
    assert not wrong


def test_arrows_have_no_cycle() -> None:
    done: set[str] = {"_pb"}
    while left := set(ALLOWED) - done:
        free = {area for area in left if ALLOWED[area] <= done}
        assert free, f"a cycle through {left}"
        done |= free


def test_libraries_stay_where_they_belong() -> None:
    wrong = [
        f"{file} imports {name}"
        for file, area, name in imports()
        if (library := name.split(".")[0]) in LIBRARIES and area not in LIBRARIES[library]
    ]
    assert not wrong


def test_the_walk_sees_the_package() -> None:
    assert ("cli/lifecycle.py", "cli", "draftgate.gateway.server.Gateway") in set(imports())
