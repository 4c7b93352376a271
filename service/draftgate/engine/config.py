"""What the engine is told: the checkpoint's architecture and the deployment's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftgate.checkpoint.architectures import ModelShape, model_shape
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.jsonfile import read_object

__all__ = ["EngineConfig", "ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint folder's model: its sizes, and what else its configuration files say."""

    folder: Path
    """Where it lies."""
    shape: ModelShape
    """Sizes and position embedding."""
    quantization: str
    """`FP8` for a ModelOpt checkpoint, else empty."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation."""

    @property
    def name(self) -> str:
        """What the checkpoint calls itself: the folder's name."""
        return self.folder.resolve().name

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`, `generation_config.json` and `hf_quant_config.json`.

        Raises DraftgateError(FAILED_PRECONDITION) when the folder holds no such checkpoint and
        DraftgateError(UNIMPLEMENTED) naming the part that is not supported.
        """
        raw = read_object(model_dir / "config.json")
        return cls(
            folder=model_dir,
            shape=model_shape(raw),
            quantization=_quantization(model_dir),
            eos_token_ids=_eos_token_ids(raw, model_dir),
        )


@dataclass(frozen=True)
class EngineConfig:
    """One deployment of the engine."""

    dtype: str = "auto"
    """What it computes in: `bfloat16`, `float32`, or `auto` for the first except on a CPU without
    instructions for it. The engine's own configuration says which it is."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for CUDA where there is one."""
    threads: int = 0
    """CPU threads; 0 takes every core."""
    max_batch_rows: int = 32
    """Most generations in one step; fewer where the KV cache is plain memory (CUDA) and its budget
    holds fewer sequences of full length."""
    max_sequence_tokens: int = 0
    """Longest prompt plus output; 0 takes what the checkpoint is made for."""
    kv_cache_bytes: int = 1 << 30
    """Budget of the KV cache."""
    prefill_chunk_tokens: int = 128
    """Most prompt tokens in one step, so most that any decoding row waits for."""
    max_waiting: int = 256
    """Most requests that wait for a row; one more is refused."""
    drafter: str = "ngram"
    """A name in `engine.drafters.DRAFTERS`, or `none`."""
    drafter_dir: str = ""
    """The folder of the drafter's weights, where it has any."""
    draft_len: int = 4
    """Longest draft, in tokens; 0 never speculates."""
    gate: str = "auto"
    """Who decides how much of it each step drafts: `auto`, by load, or `fixed`, all of it."""
    costs_file: str = ""
    """What steps cost, for the gate to start from; empty: measured here, at the first start."""
    draft_width: int = 1
    """Most tokens that an EAGLE drafter lets follow one drafted token: 1 drafts chains, more spends
    the K tokens on a tree. Rows that draw by chance under rejection sampling always get chains."""
    policy_file: str = ""
    """Where an operator's policy for the gate is kept from start to start; empty: nowhere."""
    ngram_min: int = 2
    """Shortest match that the n-gram drafter follows, in tokens."""
    ngram_max: int = 6
    """Longest match it looks for."""

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> EngineConfig:
        """Build from JSON-like settings.

        Raises DraftgateError(INVALID_ARGUMENT) naming an unknown setting or one out of range.
        """
        known = {f.name: type(f.default) for f in fields(cls)}
        for name, value in raw.items():
            if name not in known:
                raise invalid_argument(name, value, f"one of the settings {', '.join(known)}")
            if type(value) is not known[name]:
                raise invalid_argument(name, value, f"a value of type {known[name].__name__}")
        config = cls(**raw)  # type: ignore[arg-type]
        config.validate()
        return config

    def validate(self) -> None:
        """Raise DraftgateError(INVALID_ARGUMENT) for the first setting out of range."""
        for name, allowed in (
            ("dtype", ("auto", "bfloat16", "float32")),
            ("device", ("auto", "cpu", "cuda")),
            ("gate", ("auto", "fixed")),
        ):
            if getattr(self, name) not in allowed:
                raise invalid_argument(name, getattr(self, name), " or ".join(allowed))
        for name, low, high in (
            ("threads", 0, 1024),
            ("max_batch_rows", 1, 1024),
            ("max_sequence_tokens", 0, 1 << 24),
            ("kv_cache_bytes", 1, 1 << 50),
            ("prefill_chunk_tokens", 1, 1 << 16),
            ("max_waiting", 0, 1 << 16),
            ("draft_len", 0, 64),
            ("draft_width", 1, 64),
            ("ngram_min", 1, 16),
            ("ngram_max", self.ngram_min, 16),
        ):
            if not low <= getattr(self, name) <= high:
                raise invalid_argument(name, getattr(self, name), f"an integer {low} to {high}")


def _quantization(model_dir: Path) -> str:
    path = model_dir / "hf_quant_config.json"
    if not path.exists():
        return ""
    algorithm = str(read_object(path).get("quantization", {}).get("quant_algo"))
    if algorithm != "FP8":
        raise DraftgateError(
            ErrorCode.UNIMPLEMENTED, f"{path}: quant_algo {algorithm} is not supported, only FP8"
        )
    return algorithm


def _eos_token_ids(raw: Mapping[str, Any], model_dir: Path) -> tuple[int, ...]:
    generation = model_dir / "generation_config.json"
    eos = read_object(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(t) for t in eos) if isinstance(eos, list) else (int(eos),)
