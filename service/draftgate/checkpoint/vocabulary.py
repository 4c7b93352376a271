"""Telling whether two folders have the same tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from draftgate.jsonfile import read_object

__all__ = ["vocabulary_digest"]


def vocabulary_digest(folder: Path) -> str | None:
    """SHA-256, in hex, of the tokens with their ids and of the merges in `tokenizer.json`.

    Other parts of the file may differ without changing what a token id means. A drafter's folder
    may hold the digest alone, in `config.json` as `target_vocabulary_sha256`. None where a folder
    tells neither. Raises DraftgateError(FAILED_PRECONDITION) for a damaged file.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        found = read_object(folder / "config.json").get("target_vocabulary_sha256")
        return None if found is None else str(found)
    raw = read_object(path)
    model = raw.get("model") or {}
    vocabulary = dict(model.get("vocab") or {}) if isinstance(model.get("vocab"), dict) else {}
    added = {str(t.get("content")): t.get("id") for t in raw.get("added_tokens") or []}
    merges = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or []]
    content = [sorted({**vocabulary, **added}.items(), key=lambda item: (item[1], item[0])), merges]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
