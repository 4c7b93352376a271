"""Settings from a file, the environment and flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.config import Settings, changed, examine, gateway_config, load
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import GatewayConfig
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.auth import JwtConfig, SecurityConfig, TlsConfig
from draftgate.gateway.auth.tenants_file import read_directory
from draftgate.gateway.defaults import RequestDefaults
from draftgate.gateway.tenant import Scope
from draftgate.upstream.coalescing import CoalescingConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "draftgate.yaml"


def test_without_any_the_gateway_is_as_it_is_by_itself() -> None:
    settings = load().settings
    config = gateway_config(settings, triton_target="t:1", model_name="m", tokenizer_dir=None)
    assert config == GatewayConfig(triton_target="t:1", model_name="m")


def test_every_setting_can_stand_in_the_file(file: Path) -> None:
    file.write_text(
        """
        listen: 127.0.0.1:1
        workers: 4
        max_connection_age_s: 60
        admin_listen: 127.0.0.1:2
        triton: "a:1,dns:///b:2"
        tokenizer_dir: models/m
        model_name: m
        entry: engine
        grace_s: 3
        log_level: info
        otlp_endpoint: collector:4317
        trace_sample_ratio: 0.5
        defaults: {max_tokens: 5, temperature: 0.5, top_k: 4, generation_config: true}
        max_output_tokens: 9
        max_prompt_tokens: 10
        max_prompt_bytes: 6
        max_messages: 7
        max_choices: 2
        write_timeout_s: 8
        coalescing: {busy_chunks_per_s: 100, max_delay_ms: 30}
        admission: {max_concurrency: 1, max_waiting: 2, max_wait_s: 3}
        security:
          tls: {cert_file: a.crt, key_file: a.key, client_ca_file: c.crt}
          tenants_file: tenants.yaml
          jwt: {jwks_file: jwks.json, issuer: i, audience: a, algorithms: [ES256]}
          limits: {max_connections: 9}
        """
    )
    settings = load(file).settings
    assert (settings.grace_s, settings.log_level, settings.workers) == (3.0, "info", 4)
    config = gateway_config(settings, triton_target="t:1", model_name="m", tokenizer_dir=None)
    assert (config.listen, config.otlp_endpoint) == ("127.0.0.1:1", "collector:4317")
    assert (settings.triton, settings.tokenizer_dir) == ("a:1,dns:///b:2", Path("models/m"))
    assert (config.admin_listen, config.entry, settings.model_name) == (
        "127.0.0.1:2",
        "engine",
        "m",
    )
    assert config.trace_sample_ratio == 0.5
    assert config.defaults == RequestDefaults(5, 0.5, top_k=4, generation_config=True)
    assert (config.max_output_tokens, config.max_prompt_tokens) == (9, 10)
    assert config.max_choices == 2
    assert (config.max_prompt_bytes, config.max_messages, config.write_timeout_s) == (6, 7, 8)
    assert config.max_connection_age_s == 60
    assert config.coalescing == CoalescingConfig(100.0, 30.0)
    assert config.admission == AdmissionConfig(1, 2, 3.0)
    assert config.security.tls == TlsConfig(Path("a.crt"), Path("a.key"), Path("c.crt"))
    assert config.security.jwt == JwtConfig(Path("jwks.json"), "i", "a", ("ES256",))
    assert config.security.limits.max_connections == 9


def test_flags_win_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("{listen: 'file:1', grace_s: 1, log_level: info, admission: {max_waiting: 1}}")
    monkeypatch.setenv("DRAFTGATE_LISTEN", "environment:1")
    monkeypatch.setenv("DRAFTGATE_GRACE_S", "2")
    monkeypatch.setenv("DRAFTGATE_ADMISSION__MAX_CONCURRENCY", "2")
    monkeypatch.setenv("DRAFTGATE_SECURITY__TLS__CERT_FILE", "a.crt")
    monkeypatch.setenv("DRAFTGATE_SECURITY__TLS__KEY_FILE", "a.key")
    loaded = load(file, {"listen": "flag:1", "security": {"insecure": True}})
    settings = loaded.settings
    assert (settings.listen, settings.grace_s, settings.log_level) == ("flag:1", 2.0, "info")
    assert settings.admission == AdmissionConfig(max_concurrency=2, max_waiting=1)
    assert settings.security.insecure
    assert settings.security.tls == TlsConfig(Path("a.crt"), Path("a.key"))
    lines = {key: (value, source) for key, value, source in loaded.lines()}
    assert lines["listen"] == ("flag:1", "command line")
    assert lines["grace_s"] == ("2.0", "environment")
    assert lines["log_level"] == ("info", str(file))
    assert lines["admission.max_waiting"] == ("1", str(file))
    assert lines["admission.max_wait_s"] == ("60.0", "default")
    assert lines["security.tls.cert_file"] == ("a.crt", "environment")
    assert lines["security.insecure"] == ("True", "command line")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("listn: x", "listn: Extra inputs are not permitted (FILE)"),
        ("admission: {max_waitng: 1}", "admission.max_waitng: Unexpected keyword argument (FILE)"),
        ("admission: {max_waiting: -1}", "admission.max_waiting: Input should be greater than or"),
        ("admission: 3", "admission: Input should be a dictionary"),
        ("log_level: loud", "log_level: Input should be 'debug', 'info', 'warning' or 'error'"),
        ("trace_sample_ratio: .nan", "trace_sample_ratio: Input should be"),
        ("security: {tls: {cert_file: a}}", "security.tls.key_file: Field required"),
        ("security: {limits: {max_connections: 0}}", "security.limits.max_connections: Input"),
        (
            "security: {jwt: {jwks_file: a, issuer: b, audience: c}}",
            "security.tenants_file: got None, allowed: a file of tenants, with jwt",
        ),
        (
            "security: {tenants_file: t, jwt: {jwks_file: a, issuer: b, audience: c, "
            "algorithms: [HS256]}}",
            "security.jwt.algorithms: got 'HS256', allowed: ES256, ",
        ),
        ("defaults: {top_p: 0}", "defaults.top_p: got 0.0, allowed: a finite number above 0 to 1"),
        ("defaults: {max_tokens: x}", "defaults.max_tokens: Input should be a valid integer"),
        (
            "{defaults: {max_tokens: 600}, max_output_tokens: 512}",
            "defaults.max_tokens: got 600, allowed: at most max_output_tokens, 512 (FILE)",
        ),
        ("defaults: {seed: 1}", "defaults.seed: Unexpected keyword argument (FILE)"),
        ("max_choices: 0", "max_choices: Input should be greater than or equal to 1"),
        ("triton: ''", "triton: String should have at least 1 character"),
        ("{", "FILE: no YAML at line 1, column 2"),
        ("[1]", "FILE: no mapping of names"),
        ("1: 2", "FILE: no mapping of names"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(DraftgateError) as caught:
        load(file)
    assert caught.value.message.startswith(problem.replace("FILE", str(file)))


def test_all_that_is_wrong_is_named_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("{grace_s: -1, max_messages: 0}")
    monkeypatch.setenv("DRAFTGATE_ADMISSION__MAX_WAITING", "many")
    with pytest.raises(DraftgateError) as caught:
        load(file)
    problems = caught.value.message.split("; ")
    assert [each.partition(":")[0] for each in problems] == [
        "grace_s",
        "max_messages",
        "admission.max_waiting",
    ]
    assert problems[2].endswith("(environment)")


def test_what_one_problem_would_hide_is_named_too(file: Path) -> None:
    """Sections that check themselves, fields behind the first one, and what goes together."""
    file.write_text(
        """
        grace_s: -1
        defaults: {top_p: 0, temperature: -1, max_tokens: 9, nonsense: 1}
        max_output_tokens: 8
        security:
          tls: {cert_file: a}
          tenants_file: t
          jwt: {issuer: b, algorithms: [HS256, ES256]}
          limits: {max_connections: 0}
        """
    )
    found = examine(file)
    assert sorted(each.message.partition(":")[0] for each in found.problems) == [
        "defaults.max_tokens",
        "defaults.nonsense",
        "defaults.temperature",
        "defaults.top_p",
        "grace_s",
        "security.jwt.audience",
        "security.jwt.jwks_file",
        "security.limits.max_connections",
        "security.tls.key_file",
    ]
    assert found.left_out == {"defaults", "grace_s", "security"}
    # What is right stays, for others to look at.
    assert found.settings is not None
    assert found.settings.max_output_tokens == 8
    assert found.settings.security == SecurityConfig(tenants_file=Path("t"))


def test_what_lacks_something_that_was_wrong_is_not_wrong_itself(file: Path) -> None:
    file.write_text(
        "security: {tenants_file: [], jwt: {jwks_file: a, issuer: b, audience: c}, insecure: 3}"
    )
    problems = [each.message.partition(":")[0] for each in examine(file).problems]
    assert problems == ["security.insecure", "security.tenants_file"]


def test_a_source_that_cannot_be_read_says_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTGATE_GRACE_S", "-1")
    found = examine(tmp_path / "none.yaml")
    assert [each.code for each in found.problems] == [
        ErrorCode.NOT_FOUND,
        ErrorCode.INVALID_ARGUMENT,
    ]
    assert found.settings is None


def test_a_value_that_is_wrong_is_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("admission: {max_waiting: s3cret}")
    monkeypatch.setenv("DRAFTGATE_SECURITY", "{s3cret")
    with pytest.raises(DraftgateError) as caught:
        load(file)
    assert caught.value.message.startswith(
        'environment: error parsing value for field "security"; admission.max_waiting: Input '
    )
    assert "s3cret" not in caught.value.message
    monkeypatch.delenv("DRAFTGATE_SECURITY")
    with pytest.raises(DraftgateError) as caught:
        load(file)
    assert "s3cret" not in caught.value.message


def test_credentials_in_an_address_are_not_shown() -> None:
    loaded = load(flags={"otlp_endpoint": "https://user:s3cret@collector:4317"})
    lines = {key: value for key, value, _ in loaded.lines()}
    assert lines["otlp_endpoint"] == "https://***@collector:4317"


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match=r"none\.yaml cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_what_has_changed_is_named_key_by_key() -> None:
    old = load(flags={"admission": {"max_waiting": 1}}).settings
    tls = {"cert_file": "a", "key_file": "b"}
    new = load(flags={"grace_s": 1, "security": {"tls": tls}}).settings
    assert changed(old, old) == []
    assert changed(old, new) == [
        "admission.max_waiting",
        "grace_s",
        "security.tls.cert_file",
        "security.tls.key_file",
    ]


@given(
    grace_s=st.floats(0, 86_400),
    max_waiting=st.none() | st.integers(0, 100_000),
    max_wait_s=st.floats(0.001, 86_400),
)
def test_what_is_in_range_is_taken(
    grace_s: float, max_waiting: int | None, max_wait_s: float
) -> None:
    admission = {"max_waiting": max_waiting, "max_wait_s": max_wait_s}
    settings = load(flags={"grace_s": grace_s, "admission": admission}).settings
    assert isinstance(settings, Settings)
    assert settings.grace_s == grace_s
    assert settings.admission == AdmissionConfig(max_waiting=max_waiting, max_wait_s=max_wait_s)


def test_the_examples_are_right() -> None:
    examples = Path(__file__).parents[2] / "examples"
    settings = load(examples / "gateway.yaml").settings
    assert settings.security.tls is not None
    tenants = read_directory(examples / "tenants.yaml").tenants
    assert tenants["search"].limits.tokens_per_minute == 200_000
    assert tenants["operations"].scopes == set(Scope)
