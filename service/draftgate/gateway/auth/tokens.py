"""JSON web tokens: signed by somebody whom we trust, for us, and not expired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.auth.config import PUBLIC_KEY_ALGORITHMS, JwtConfig
from draftgate.gateway.tenant import Scope

__all__ = ["TokenVerifier"]

_MAX_BYTES = 2**20

# What the caller is told of each way in which a token fails; the first that fits.
_PROBLEMS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidAudienceError, "the token is for another audience"),
    (jwt.InvalidIssuerError, "the token is of another issuer"),
    (jwt.MissingRequiredClaimError, "the token lacks exp, iss or aud"),
    (jwt.InvalidAlgorithmError, "the token is signed with an algorithm that is not accepted"),
)


class TokenVerifier:
    """Checks tokens against the key set as it was when this was made."""

    def __init__(self, config: JwtConfig) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) for a key set that is of no use."""
        self._config = config
        self._keys = _read_keys(config.jwks_file)

    def claims(self, token: str) -> dict[str, Any]:
        """What a token says. Raises DraftgateError(UNAUTHENTICATED) unless it can be trusted."""
        config = self._config
        try:
            key = self._keys.get(jwt.get_unverified_header(token).get("kid", ""))
            if key is None:
                raise _untrusted("the token is signed with a key that is not known here")
            # Otherwise the key's own algorithm would do, whatever the token says.
            return jwt.decode(
                token,
                key,
                algorithms=[each for each in config.algorithms if each == key.algorithm_name],
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            known = (text for kind, text in _PROBLEMS if isinstance(error, kind))
            raise _untrusted(next(known, "the token is not valid")) from None

    def tenant_name(self, claims: dict[str, Any]) -> str:
        """Whom the token is for. Raises DraftgateError(UNAUTHENTICATED) if it does not say."""
        name = claims.get(self._config.tenant_claim)
        if not isinstance(name, str) or not name:
            raise _untrusted(f"the token has no claim {self._config.tenant_claim!r}")
        return name

    @staticmethod
    def scopes(claims: dict[str, Any]) -> frozenset[Scope]:
        """The scopes that the token is limited to: those of `scope`, or all if it has none."""
        if "scope" not in claims:
            return frozenset(Scope)
        words = str(claims["scope"]).split()
        return frozenset(each for each in Scope if each.value in words)


def _read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    try:
        with path.open(encoding="utf-8") as file:
            content = json.loads(file.read(_MAX_BYTES))
        if not isinstance(content, dict) or not all(
            isinstance(each, dict) for each in content.get("keys") or ()
        ):
            raise _unusable(path, "no JSON Web Key Set with a usable key")
        found = jwt.PyJWKSet.from_dict(content).keys
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be read") from error
    except (ValueError, jwt.PyJWTError) as error:
        raise _unusable(path, "no JSON Web Key Set with a usable key") from error
    keys = {each.key_id: each for each in found if each.algorithm_name in PUBLIC_KEY_ALGORITHMS}
    if not keys or None in keys:
        raise _unusable(path, "each key needs a kid and a public key of a known algorithm")
    return {str(key_id): key for key_id, key in keys.items()}


def _unusable(path: Path, problem: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"jwks_file: {path}: {problem}")


def _untrusted(message: str) -> DraftgateError:
    return DraftgateError(ErrorCode.UNAUTHENTICATED, message)
