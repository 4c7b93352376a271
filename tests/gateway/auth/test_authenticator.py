"""From credentials to a tenant."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.auth import Authenticator, JwtConfig, SecurityConfig, new_key
from draftgate.gateway.tenant import Scope, TenantLimits
from tests.support.tenants import Issuer, TenantsFile


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsFile:
    return TenantsFile(tmp_path / "tenants.yaml")


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


def config(tenants: TenantsFile, issuer: Issuer | None = None) -> SecurityConfig:
    tokens = issuer and JwtConfig(issuer.jwks_file, "https://issuer.test", "draftgate")
    return SecurityConfig(tenants_file=tenants.path, jwt=tokens, reload_interval_s=0.01)


def bearer(credentials: str) -> dict[str, str | bytes]:
    return {"authorization": f"Bearer {credentials}"}


def refused(
    who: Authenticator,
    metadata: dict[str, str | bytes],
    code: ErrorCode = ErrorCode.UNAUTHENTICATED,
) -> str:
    with pytest.raises(DraftgateError) as caught:
        who.tenant(metadata)
    assert caught.value.code is code
    return caught.value.message


def test_a_key_names_its_tenant_with_limits_and_scopes(tenants: TenantsFile) -> None:
    key = tenants.add("acme", scopes=["generate", "admin"], weight=2, tokens_per_minute=100)
    tenants.add("other")
    who = Authenticator(config(tenants))
    for metadata in (bearer(key), {"authorization": f"bearer  {key} "}, {"x-api-key": key}):
        tenant = who.tenant(metadata)
        assert tenant.name == "acme"
        assert tenant.limits == TenantLimits(weight=2, tokens_per_minute=100)
        assert tenant.scopes == {Scope.GENERATE, Scope.ADMIN}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no credentials: give an API key or a token"),
        ({"authorization": "Basic dXNlcjpwYXNz"}, "the authorization header is of another kind"),
        ({"authorization": "Bearer "}, "the authorization header is of another kind"),
        ({"authorization": b"\xff"}, "no credentials"),
        (bearer("nonsense"), "the credentials are no API key of this server"),
        (bearer("a.b.c"), "the credentials are no API key of this server"),
        (bearer("dg_"), "the API key is not valid"),
        (bearer(new_key()[0]), "the API key is not valid"),
        ({"x-api-key": "dg_ü"}, "the API key is not valid"),
    ],
)
def test_without_good_credentials_nobody_is_let_in(
    tenants: TenantsFile, metadata: dict[str, str | bytes], message: str
) -> None:
    tenants.add("acme")
    assert refused(Authenticator(config(tenants)), metadata).startswith(message)


@given(at=st.integers(0, 83), digit=st.sampled_from("0123456789abcdef"))
def test_a_key_with_one_other_character_is_no_key(
    tmp_path_factory: pytest.TempPathFactory, at: int, digit: str
) -> None:
    tenants = TenantsFile(tmp_path_factory.mktemp("keys") / "tenants.yaml")
    key = tenants.add("acme")
    who = Authenticator(config(tenants))
    other = key[:at] + digit + key[at + 1 :]
    if other == key:
        assert who.tenant(bearer(key)).name == "acme"
    else:
        refused(who, bearer(other))


def test_keys_are_compared_in_constant_time(
    tenants: TenantsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tenants.add("acme")
    who = Authenticator(config(tenants))
    compared: list[tuple[str, str]] = []
    real = hmac.compare_digest

    def compare(first: str, second: str) -> bool:
        compared.append((first, second))
        return real(first, second)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    who.tenant(bearer(key))
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert compared == [(digest, digest)]


def test_an_expired_key_says_so(tenants: TenantsFile) -> None:
    expires = datetime(2030, 1, 1, tzinfo=UTC)
    key = tenants.add("acme", expires=expires)
    now = expires - timedelta(seconds=1)
    who = Authenticator(config(tenants), clock=lambda: now)
    assert who.tenant(bearer(key)).name == "acme"
    now = expires
    assert refused(who, bearer(key)) == "the API key has expired"


def test_a_token_names_its_tenant(tenants: TenantsFile, issuer: Issuer) -> None:
    key = tenants.add("acme", scopes=["generate", "admin"], max_concurrency=3)
    who = Authenticator(config(tenants, issuer))
    assert who.tenant(bearer(issuer.token())) == who.tenant(bearer(key))


@pytest.mark.parametrize(
    ("scope", "scopes"),
    [
        ("generate", {Scope.GENERATE}),
        ("other generate admin", {Scope.GENERATE}),
        ("other", set()),
        ("", set()),
    ],
)
def test_a_token_may_be_good_for_less_than_its_tenant(
    tenants: TenantsFile, issuer: Issuer, scope: str, scopes: set[Scope]
) -> None:
    tenants.add("acme")
    who = Authenticator(config(tenants, issuer))
    assert who.tenant(bearer(issuer.token(scope=scope))).scopes == scopes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: i.token(exp=datetime(2020, 1, 1, tzinfo=UTC)), "the token has expired"),
        (lambda i: i.token(nbf=datetime(2100, 1, 1, tzinfo=UTC)), "the token is not valid yet"),
        (lambda i: i.token(aud="another"), "the token is for another audience"),
        (lambda i: i.token(iss="https://evil.test"), "the token is of another issuer"),
        (lambda i: i.token(exp=None), "the token lacks exp, iss or aud"),
        (lambda i: i.token(aud=None), "the token lacks exp, iss or aud"),
        (lambda i: i.token(sub=None), "the token has no claim 'sub'"),
        (lambda i: i.token({"kid": "other"}), "the token is signed with a key that is not known"),
        (lambda i: i.token()[:-10] + "AAAAAAAAAA", "the token is not valid"),
        (lambda i: i.unsigned(), "the token is signed with an algorithm that is not accepted"),
        (
            lambda i: jwt.encode({"sub": "acme"}, "x" * 64, headers={"kid": "first"}),
            "the token is signed with an algorithm that is not accepted",
        ),
        (lambda i: "a.b.c", "the token is not valid"),
        (lambda i: "nonsense", "the token is not valid"),
    ],
)
def test_a_token_that_cannot_be_trusted_says_why(
    tenants: TenantsFile, issuer: Issuer, make: Callable[[Issuer], str], message: str
) -> None:
    tenants.add("acme")
    who = Authenticator(config(tenants, issuer))
    assert refused(who, bearer(make(issuer))).startswith(message)


def test_a_token_for_an_unknown_tenant_is_not_permitted(
    tenants: TenantsFile, issuer: Issuer
) -> None:
    tenants.add("acme")
    who = Authenticator(config(tenants, issuer))
    message = refused(who, bearer(issuer.token(sub="nobody")), ErrorCode.PERMISSION_DENIED)
    assert message == "the token's tenant may not use this server"


def test_files_that_changed_are_read_again(tenants: TenantsFile, issuer: Issuer) -> None:
    old = tenants.add("acme")
    who = Authenticator(config(tenants, issuer))
    old_token = issuer.token()
    new = tenants.add("acme")
    issuer.rotate("second")
    who.reload()
    assert who.tenant(bearer(new)).name == "acme"
    assert who.tenant(bearer(issuer.token())).name == "acme"
    refused(who, bearer(old))
    refused(who, bearer(old_token))


def test_a_damaged_file_changes_nothing(tenants: TenantsFile) -> None:
    key = tenants.add("acme")
    who = Authenticator(config(tenants))
    tenants.path.write_text("tenants: {acme: {keys: [{id: s3cret}]}}")
    with pytest.raises(DraftgateError) as caught:
        who.reload()
    assert "tenants.acme.keys.0.id: " in caught.value.message
    assert "s3cret" not in caught.value.message
    assert who.tenant(bearer(key)).name == "acme"


async def test_changes_are_noticed_and_damage_is_said_once(
    tenants: TenantsFile, caplog: pytest.LogCaptureFixture
) -> None:
    tenants.add("acme")
    who = Authenticator(config(tenants))
    watching = asyncio.create_task(who.watch())
    try:
        tenants.path.write_text("[")
        await asyncio.sleep(0.2)
        new = tenants.add("acme")
        async with asyncio.timeout(30):
            while not _works(who, new):
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "tenants.yaml: no YAML at line" in errors[0].getMessage()


def _works(who: Authenticator, key: str) -> bool:
    with contextlib.suppress(DraftgateError):
        who.tenant(bearer(key))
        return True
    return False


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "tenants: Field required"),
        ("- a", "no mapping of names"),
        ("tenants: {}", "tenants: "),
        ("tenants: {a: {limit: {}}}", "tenants.a.limit: Extra inputs are not permitted"),
        ("tenants: {a: {limits: {weight: 0}}}", "tenants.a.limits.weight: Input should be greater"),
        ("tenants: {a: {limits: {max_concurrency: 0}}}", "tenants.a.limits.max_concurrency: "),
        ("tenants: {a: {scopes: [root]}}", "tenants.a.scopes.0: Input should be 'generate' or"),
        ("tenants: {'a b': {}}", "tenants.a b"),
        ("tenants: {a: !!python/object:os.system {}}", "no YAML at line 1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(DraftgateError) as caught:
        Authenticator(SecurityConfig(tenants_file=path))
    assert caught.value.message.startswith(f"{path}: {problem}")


def test_one_id_for_two_keys_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    entry = f"{{id: {'ab' * 8}, sha256: {'cd' * 32}}}"
    path.write_text(f"tenants: {{a: {{keys: [{entry}]}}, b: {{keys: [{entry}]}}}}")
    with pytest.raises(DraftgateError, match=r"tenants\.b\.keys: the id \w+ stands there twice"):
        Authenticator(SecurityConfig(tenants_file=path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("nonsense", "no JSON Web Key Set with a usable key"),
        ("[]", "no JSON Web Key Set with a usable key"),
        ('{"keys": []}', "no JSON Web Key Set with a usable key"),
        ('{"keys": ["a"]}', "no JSON Web Key Set with a usable key"),
        ('{"keys": [{"kty": "oct", "kid": "a", "k": "c2VjcmV0"}]}', "each key needs a kid and a"),
    ],
)
def test_a_key_set_that_is_of_no_use_is_one_clear_error(
    tenants: TenantsFile, tmp_path: Path, content: str | None, problem: str
) -> None:
    tenants.add("acme")
    path = tmp_path / "jwks.json"
    if content is not None:
        path.write_text(content)
    wrong = SecurityConfig(tenants_file=tenants.path, jwt=JwtConfig(path, "i", "a"))
    with pytest.raises(DraftgateError) as caught:
        Authenticator(wrong)
    assert caught.value.message.startswith(f"jwks_file: {path}: {problem}")


def test_tokens_need_known_tenants_and_public_keys(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match=r"security\.tenants_file: got None"):
        SecurityConfig(jwt=JwtConfig(tmp_path, "i", "a"))
    with pytest.raises(DraftgateError, match=r"security\.jwt\.algorithms: got 'HS256', allowed"):
        JwtConfig(tmp_path, "i", "a", algorithms=("RS256", "HS256"))
