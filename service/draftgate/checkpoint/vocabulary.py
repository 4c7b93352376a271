"""Telling whether two folders have the same tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from draftgate.errors import DraftgateError, ErrorCode
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
    model = raw.get("model")
    if not isinstance(model, dict):
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{path} describes no model")
    added = [(t.get("id"), t.get("content")) for t in raw.get("added_tokens") or []]
    # Pieces of a Unigram model are a list, the place of each its id.
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        vocabulary = sorted((number, token) for token, number in vocabulary.items())
    merges = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or []]
    content = [vocabulary, sorted(added, key=str), merges]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
