"""The gate that an engine's configuration asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from draftgate.engine.config import EngineConfig
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.jsonfile import read_object
from draftgate.speculation import CostTable, Gate, GateSettings, Mode, Policy

__all__ = ["draft_lens", "make_gate", "save_policy", "saved_policy"]

_LENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draft lengths that a gate chooses from: the longer, the less one more changes."""


_SETTINGS = GateSettings(by_row=False)
"""Drafts by row win where verified tokens are dear and draft steps are cheap. Here a step takes
about as long as its longest draft: measured live they cost 8 % at 8 rows and gain nothing at 32."""


def draft_lens(longest: int) -> tuple[int, ...]:
    """What may be chosen where the longest draft is so long."""
    return (*(draft_len for draft_len in _LENS if draft_len < longest), longest)


def make_gate(config: EngineConfig, costs: CostTable | None, *, speculates: bool = True) -> Gate:
    """costs: what a gate that decides by load needs; until it has them it drafts all it may.
    speculates: whether there is a drafter."""
    longest = config.draft_len if speculates else 0
    policy = Policy()
    if config.gate == "fixed" or not longest:
        policy = Policy(mode=Mode.FIXED, draft_len=longest)
    return Gate(draft_lens(longest), costs, policy, _SETTINGS)


def saved_policy(config: EngineConfig) -> Policy | None:
    """What an operator saved; None: nothing.

    Raises DraftgateError where the file holds no policy.
    """
    path = Path(config.policy_file)
    if not config.policy_file or not path.exists():
        return None
    try:
        return Policy.from_mapping(read_object(path))
    except DraftgateError as error:
        raise DraftgateError(error.code, f"{path}: {error.message}") from error


def save_policy(config: EngineConfig, policy: Policy) -> None:
    """Keep it for the next start, whole or not at all.

    Raises DraftgateError(FAILED_PRECONDITION) where the configuration names no place or it cannot
    be written.
    """
    if not config.policy_file:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            "the policy cannot be saved: the server was started without a policy file",
        )
    path = Path(config.policy_file)
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps(policy.to_mapping()) + "\n", encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"the policy cannot be saved: cannot write {path}: {error.strerror}",
        ) from error
