"""A file of tenants, and tokens, made for a test."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from draftgate.gateway.auth import new_key

__all__ = ["Issuer", "TenantsFile"]


class TenantsFile:
    """A file that tenants are added to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tenants: dict[str, Any] = {}

    def add(
        self,
        name: str,
        *,
        scopes: Sequence[str] = ("generate",),
        expires: datetime | None = None,
        **limits: float,
    ) -> str:
        """A new key of a tenant, which is added or replaced."""
        key, kept = new_key()
        entry: dict[str, Any] = {"id": kept.id, "sha256": kept.sha256}
        if expires:
            entry["expires"] = expires
        self._tenants[name] = {"limits": limits, "scopes": list(scopes), "keys": [entry]}
        self.write()
        return key

    def remove(self, name: str) -> None:
        del self._tenants[name]
        self.write()

    def write(self) -> None:
        """At once, as an editor or a mounted secret does."""
        replace(self.path, yaml.safe_dump({"tenants": self._tenants}))


class Issuer:
    """Signs JSON web tokens."""

    def __init__(self, jwks_file: Path, key_id: str = "first") -> None:
        self.jwks_file = jwks_file
        self.rotate(key_id)

    def rotate(self, key_id: str) -> None:
        """Sign with a new key, the only one in the set."""
        self._key_id = key_id
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(ECAlgorithm.to_jwk(self._key.public_key()))
        public |= {"kid": key_id, "alg": "ES256", "use": "sig"}
        replace(self.jwks_file, json.dumps({"keys": [public]}))

    def token(self, headers: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """For tenant `acme`, unless claims say otherwise; None leaves one out."""
        said = {
            "iss": "https://issuer.test",
            "aud": "draftgate",
            "sub": "acme",
            "exp": datetime.now(UTC) + timedelta(minutes=5),
        } | claims
        given = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(
            given, self._key, algorithm="ES256", headers={"kid": self._key_id, **(headers or {})}
        )

    def unsigned(self) -> str:
        """A token that claims to need no signature."""
        header, payload, _ = self.token().split(".")
        content = {"alg": "none", "kid": self._key_id}
        header = base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()
        return f"{header}.{payload}."


def replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
