"""The engine's control plane: one JSON object asks, one answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from draftgate.contract import CONTROL
from draftgate.engine import Engine
from draftgate.errors import invalid_argument
from draftgate.speculation import Policy
from draftgate.text import Tokenizer

__all__ = ["Control"]

_MOST_STEPS = 256
"""In one answer: to write it takes milliseconds, in which Python runs nothing else."""


class Control:
    """Answers for an engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._run = uuid.uuid4().hex
        """Names this run of the engine: another one numbers its steps from 1 again."""
        self._operations = {
            "describe": self._describe,
            "counters": self._counters,
            "gate": self._gate,
            "set_gate_policy": self._set_gate_policy,
            "gate_steps": self._gate_steps,
        }

    def answer(self, text: str) -> str:
        """Do what `text` asks for. Raises DraftgateError: INVALID_ARGUMENT naming what is wrong
        with it, or what the operation raises."""
        try:
            asked = json.loads(text)
            operation = asked.get("op")
        except (ValueError, AttributeError, RecursionError):
            raise invalid_argument(CONTROL, text, 'a JSON object with "op"') from None
        if not isinstance(operation, str) or operation not in self._operations:
            *names, last = self._operations
            allowed = f"{', '.join(names)} or {last}"
            raise invalid_argument(f"{CONTROL}.op", operation, allowed)
        return json.dumps(self._operations[operation](asked))

    def _describe(self, _: Mapping[str, Any]) -> dict[str, object]:
        model, config = self._engine.target.config, self._engine.config
        speculates = self._engine.speculates
        return {
            "name": model.name,
            "architecture": model.shape.architecture,
            "quantization": model.quantization,
            "compute_dtype": config.dtype,
            "vocab_size": model.shape.vocab_size,
            "max_sequence_tokens": self._engine.max_sequence_tokens,
            "eos_token_ids": list(model.eos_token_ids),
            "has_chat_template": self._tokenizer.has_chat_template,
            "drafter": config.drafter if speculates else "",
            "max_draft_len": config.draft_len if speculates else 0,
            "max_batch_rows": self._engine.max_batch_rows,
            "kv_total_tokens": self._engine.kv_total_tokens,
        }

    def _counters(self, _: Mapping[str, Any]) -> dict[str, object]:
        return asdict(self._engine.counters())

    def _gate(self, _: Mapping[str, Any]) -> dict[str, object]:
        return self._engine.gate_state()

    def _set_gate_policy(self, asked: Mapping[str, Any]) -> dict[str, object]:
        policy, save = asked.get("policy"), asked.get("save", False)
        if not isinstance(policy, dict):
            raise invalid_argument("policy", policy, "a JSON object")
        if not isinstance(save, bool):
            raise invalid_argument("save", save, "true or false")
        self._engine.set_policy(Policy.from_mapping(policy), save=save)
        return self._engine.gate_state()

    def _gate_steps(self, asked: Mapping[str, Any]) -> dict[str, object]:
        """The steps after number `after`, the oldest first, at most `most`; without `after` none,
        but the number to go on from."""
        most = _count(asked, "most", 1, _MOST_STEPS, _MOST_STEPS)
        if "after" in asked:
            found = self._engine.steps_since(_count(asked, "after", 0, 1 << 62), most)
        else:
            found = self._engine.steps_since(0, 0)
        return {
            "steps": [record.to_mapping() for record in found.steps],
            "lost": found.lost if "after" in asked else 0,
            "last_step": found.last_step,
            "run": self._run,
        }


def _count(
    asked: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None
) -> int:
    value = asked.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise invalid_argument(name, value, f"an integer {low} to {high}")
    return value
