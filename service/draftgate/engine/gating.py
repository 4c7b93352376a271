"""The gate that an engine's configuration asks for."""

from __future__ import annotations

import json
from pathlib import Path

from draftgate.engine.config import EngineConfig
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.jsonfile import read_object
from draftgate.speculation import CostTable, Gate, Mode, Policy

__all__ = ["draft_lens", "make_gate", "save_policy", "saved_policy"]

_LENS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Draft lengths that a gate chooses from: the longer, the less one more changes, and each has to
be measured."""


def draft_lens(longest: int) -> tuple[int, ...]:
    """What may be chosen where the longest draft is so long."""
    return (*(draft_len for draft_len in _LENS if draft_len < longest), longest)


def make_gate(config: EngineConfig, costs: CostTable | None) -> Gate:
    """costs: what a gate that decides by load needs; until it has them it drafts all it may."""
    policy = Policy()
    if config.gate == "fixed" or config.draft_len == 0:
        policy = Policy(mode=Mode.FIXED, draft_len=config.draft_len)
    return Gate(draft_lens(config.draft_len), costs, policy)


def saved_policy(config: EngineConfig) -> Policy | None:
    """What an operator saved; None: nothing.

    Raises DraftgateError where the file holds no policy.
    """
    path = Path(config.policy_file)
    if not config.policy_file or not path.exists():
        return None
    try:
        policy = Policy.from_mapping(read_object(path))
        policy.validate(config.draft_len)
    except DraftgateError as error:
        raise DraftgateError(error.code, f"{path}: {error.message}") from error
    return policy


def save_policy(config: EngineConfig, policy: Policy) -> None:
    """Keep it for the next start.

    Raises DraftgateError(FAILED_PRECONDITION) where the configuration names no place or it cannot
    be written.
    """
    if not config.policy_file:
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "policy_file: no place to keep it")
    path = Path(config.policy_file)
    half = path.with_name(f"{path.name}.half")
    try:
        half.write_text(json.dumps(policy.to_mapping()) + "\n", encoding="utf-8")
        half.rename(path)
    except OSError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"cannot write {path}: {error.strerror}"
        ) from error
