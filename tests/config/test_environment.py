"""Variables that begin like settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import draftgate
from draftgate.config import load
from draftgate.errors import DraftgateError

ROOT = Path(draftgate.__path__[0]).parents[1]


@pytest.mark.parametrize(
    ("variable", "problem"),
    [
        ("DRAFTGATE_LISTN", "it names no setting; the nearest is DRAFTGATE_LISTEN"),
        (
            "DRAFTGATE_ADMISSION_MAX_WAITING",
            "it names no setting; the nearest is DRAFTGATE_ADMISSION__MAX_WAITING",
        ),
        (
            "DRAFTGATE_SECURITY__TLS__CERTFILE",
            "it names no setting; the nearest is DRAFTGATE_SECURITY__TLS__CERT_FILE",
        ),
        ("DRAFTGATE_API_KEYS", "it names no setting; the nearest is DRAFTGATE_API_KEY"),
        ("DRAFTGATE_LISTEN__HOST", "it names no setting; the nearest is DRAFTGATE_LISTEN"),
        ("draftgate_log_lvel", "it names no setting; the nearest is DRAFTGATE_LOG_LEVEL"),
        ("DRAFTGATE_XYZZY", "it names no setting"),
        # Not what Kubernetes says of a service.
        ("DRAFTGATE_PORT", "it names no setting"),
    ],
)
def test_one_that_names_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, problem: str
) -> None:
    monkeypatch.setenv(variable, "s3cret")
    with pytest.raises(DraftgateError) as caught:
        load()
    assert caught.value.message == f"{variable}: {problem} (environment)"


def test_all_of_them_are_named_with_what_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("grace_s: -1")
    monkeypatch.setenv("DRAFTGATE_LISTN", "x")
    monkeypatch.setenv("DRAFTGATE_GRACE", "1")
    with pytest.raises(DraftgateError) as caught:
        load(file)
    problems = caught.value.message.split(" (environment)")
    assert [each.strip("; ").partition(":")[0] for each in problems] == [
        "DRAFTGATE_GRACE",
        "DRAFTGATE_LISTN",
        "grace_s",
    ]


def test_sections_and_what_stands_in_them_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_ADMISSION", '{"max_waiting": 3}')
    monkeypatch.setenv("draftgate_security__limits__max_connections", "9")
    monkeypatch.setenv("DRAFTGATE_COALESCING__MAX_DELAY_MS", "0")
    settings = load().settings
    assert settings.admission.max_waiting == 3
    assert settings.security.limits.max_connections == 9
    assert settings.coalescing.max_delay_ms == 0


def test_those_of_other_parts_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one that the package itself names."""
    files = [*ROOT.glob("service/draftgate/**/*.py"), *ROOT.glob("model_repository/**/*.py")]
    named = {
        each
        for file in files
        if file.parent.name != "config"
        for each in re.findall(r"DRAFTGATE_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8"))
        if "__" not in each
    }
    assert {"DRAFTGATE_CERT_FILE", "DRAFTGATE_SERVER", "DRAFTGATE_ENGINE"} <= named
    for each in named:
        monkeypatch.setenv(each, "x")
    load()


def test_what_kubernetes_says_of_services_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one called draftgate, and of one called draftgate-admin."""
    for name in ("DRAFTGATE", "DRAFTGATE_ADMIN"):
        monkeypatch.setenv(f"{name}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{name}_SERVICE_PORT", "50051")
        monkeypatch.setenv(f"{name}_SERVICE_PORT_GRPC", "50051")
        monkeypatch.setenv(f"{name}_PORT", "tcp://10.0.0.1:50051")
        monkeypatch.setenv(f"{name}_PORT_50051_TCP", "tcp://10.0.0.1:50051")
        for part, value in (("PROTO", "tcp"), ("PORT", "50051"), ("ADDR", "10.0.0.1")):
            monkeypatch.setenv(f"{name}_PORT_50051_TCP_{part}", value)
    load()
