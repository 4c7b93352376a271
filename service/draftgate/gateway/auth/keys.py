"""API keys: `dg_ID_SECRET`. The id finds the key's entry, of the secret only a hash is kept.

A plain SHA-256 is enough: the secret is 256 random bits, which nobody finds by trying.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime

__all__ = ["ApiKey", "hash_of", "id_of", "new_key"]

_KEY = re.compile(r"dg_([0-9a-f]{16})_([0-9a-f]{64})")


@dataclass(frozen=True)
class ApiKey:
    """What the server keeps of a key."""

    id: str
    sha256: str
    """Of the whole key, in hexadecimal."""
    expires: datetime | None = None

    def matches(self, key: str) -> bool:
        """In the same time for every key."""
        return hmac.compare_digest(hash_of(key), self.sha256)


def new_key() -> tuple[str, ApiKey]:
    """A key that nobody has, for its owner, and what the server keeps of it."""
    key = f"dg_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
    return key, ApiKey(id_of(key), hash_of(key))


def id_of(key: str) -> str:
    """The public part of a key; empty for what is no key."""
    found = _KEY.fullmatch(key)
    return found[1] if found else ""


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
