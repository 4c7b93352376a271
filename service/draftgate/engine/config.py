"""What the engine is told: the checkpoint's architecture and the deployment's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument

__all__ = ["SUPPORTED_ARCHITECTURES", "EngineConfig", "ModelConfig", "RopeConfig"]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and how it is stretched."""

    theta: float
    """Base of the geometric progression of wavelengths."""
    kind: str
    """`default`, `linear`, `llama3` or `yarn`."""
    scaling: Mapping[str, float] = field(default_factory=dict)
    """The numbers of that kind, under the names of the checkpoint's config."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, read from a checkpoint's `config.json`."""

    architecture: str
    """Class name in `architectures`, one of SUPPORTED_ARCHITECTURES."""
    name: str
    """What the checkpoint calls itself: the folder's name."""
    quantization: str
    """`FP8` for a ModelOpt checkpoint, else empty."""
    layers: int
    """Number of decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the feed-forward layer."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; `heads` is a multiple of it."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Rows of the embedding."""
    max_positions: int
    """Longest sequence the checkpoint is made for, in tokens."""
    norm_eps: float
    """Added to the mean square in RMSNorm."""
    rope: RopeConfig
    """Position embedding."""
    tied_embeddings: bool
    """Whether the output layer is the embedding itself."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation."""

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`.

        Raises DraftgateError(FAILED_PRECONDITION) when the folder holds no such checkpoint and
        DraftgateError(UNIMPLEMENTED) naming the part that is not supported.
        """
        raw = _read_json(model_dir / "config.json")
        architecture = next(iter(raw.get("architectures") or []), "none")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise DraftgateError(
                ErrorCode.UNIMPLEMENTED,
                f"{model_dir}: architecture {architecture} is not supported; "
                f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}",
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise DraftgateError(
                ErrorCode.UNIMPLEMENTED,
                f"{model_dir}: hidden_act {raw['hidden_act']} is not supported, only silu",
            )
        try:
            return cls._from_raw(raw, architecture, model_dir)
        except KeyError as missing:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION, f"{model_dir}/config.json lacks {missing}"
            ) from missing

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any], architecture: str, model_dir: Path) -> ModelConfig:
        heads = int(raw["num_attention_heads"])
        window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
        max_positions = int(raw["max_position_embeddings"])
        return cls(
            architecture=architecture,
            name=model_dir.resolve().name,
            quantization=_quantization(model_dir),
            layers=int(raw["num_hidden_layers"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            vocab_size=int(raw["vocab_size"]),
            # Up to the window's length, sliding-window attention is full attention.
            max_positions=min(max_positions, int(window)) if window else max_positions,
            norm_eps=float(raw["rms_norm_eps"]),
            rope=_rope(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(raw, model_dir),
        )


@dataclass(frozen=True)
class EngineConfig:
    """One deployment of the engine."""

    dtype: str = "bfloat16"
    """What it computes in: `bfloat16` or `float32`."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for CUDA where there is one."""
    threads: int = 0
    """CPU threads; 0 takes every core."""
    max_batch_rows: int = 32
    """Most generations in one step."""
    max_sequence_tokens: int = 0
    """Longest prompt plus output; 0 takes what the checkpoint is made for."""
    kv_cache_bytes: int = 1 << 30
    """Budget of the KV cache."""
    prefill_chunk_tokens: int = 128
    """Most prompt tokens in one step, so most that any decoding row waits for."""
    max_waiting: int = 256
    """Most requests that wait for a row; one more is refused."""
    drafter: str = "ngram"
    """`ngram` or `none`."""
    draft_len: int = 4
    """Draft length K of every step; 0 never speculates."""
    ngram_min: int = 2
    """Shortest match that the n-gram drafter follows, in tokens."""
    ngram_max: int = 4
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
            ("dtype", ("bfloat16", "float32")),
            ("device", ("auto", "cpu", "cuda")),
            ("drafter", ("ngram", "none")),
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
            ("ngram_min", 1, 16),
            ("ngram_max", self.ngram_min, 16),
        ):
            if not low <= getattr(self, name) <= high:
                raise invalid_argument(name, getattr(self, name), f"an integer {low} to {high}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"{path} is missing: prepare a checkpoint with `draftgate model prepare`",
        ) from None
    except ValueError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"{path} is not JSON: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{path} is not a JSON object")
    return loaded


def _quantization(model_dir: Path) -> str:
    path = model_dir / "hf_quant_config.json"
    if not path.exists():
        return ""
    algorithm = str(_read_json(path).get("quantization", {}).get("quant_algo"))
    if algorithm != "FP8":
        raise DraftgateError(
            ErrorCode.UNIMPLEMENTED, f"{path}: quant_algo {algorithm} is not supported, only FP8"
        )
    return algorithm


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # Transformers 5 writes rope_parameters; before, rope_theta and rope_scaling stood apart.
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise DraftgateError(
            ErrorCode.UNIMPLEMENTED,
            f"rope scaling {kind} is not supported; supported are linear, llama3 and yarn",
        )
    scaling = {k: float(v) for k, v in parameters.items() if isinstance(v, (int, float))}
    if kind == "yarn":
        scaling.setdefault(
            "original_max_position_embeddings", float(raw["max_position_embeddings"])
        )
    return RopeConfig(theta=theta, kind=kind, scaling=scaling)


def _eos_token_ids(raw: Mapping[str, Any], model_dir: Path) -> tuple[int, ...]:
    generation = model_dir / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(t) for t in eos) if isinstance(eos, list) else (int(eos),)
