"""Which models Draftgate runs, and their sizes read from a Hugging Face `config.json`.

The one place that decides whether an architecture is supported: the checkpoint writer and the
engine both read it, so what is prepared can be run. Leaf module: no torch, no third-party import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftgate.errors import DraftgateError, ErrorCode

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_ROPE",
    "ModelShape",
    "Rope",
    "RopeKind",
    "is_quantised",
    "model_shape",
    "tensor_shapes",
    "unsupported",
]

RopeKind = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    qk_norm: bool = False
    """RMS norm on every query and key head, before the rotation."""
    always_qkv_bias: bool = False
    """q, k and v have a bias whatever `attention_bias` says, and the output projection none."""
    sliding_window_switch: bool = False
    """`sliding_window` counts only where `use_sliding_window` is true."""


SUPPORTED_ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("llama"),
    "MistralForCausalLM": _Architecture("mistral"),
    "Qwen2ForCausalLM": _Architecture("qwen2", always_qkv_bias=True, sliding_window_switch=True),
    "Qwen3ForCausalLM": _Architecture("qwen3", qk_norm=True, sliding_window_switch=True),
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base and scaling."""

    theta: float
    """Base of the frequencies."""
    kind: RopeKind = "default"
    """Scaling rule; the fields below count only where it uses them."""
    factor: float = 1.0
    """Context extension factor (linear, llama3, yarn)."""
    original_max_positions: int = 0
    """Context length before the extension, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low are divided by the factor in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high stay as they are."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a dimension is extrapolated."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is interpolated."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn; 1 elsewhere)."""


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that decides its tensors and its arithmetic."""

    architecture: str
    """Class name as in `config.json`, one of `SUPPORTED_ARCHITECTURES`."""
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence in tokens, at most the attention window where the model has one."""
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    """The output projection is the embedding table."""
    qkv_bias: bool
    output_bias: bool
    """The attention's output projection has a bias."""
    qk_norm: bool
    """RMS norm over head_dim on every query and key head, before the rotation."""


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a parsed `config.json`, in the form of transformers 4 or 5.

    Raises `DraftgateError`: UNIMPLEMENTED for a model Draftgate cannot run, naming what it is;
    FAILED_PRECONDITION for a missing or impossible number.
    """
    name, architecture = _architecture(config)
    _refuse_variants(config)
    hidden = _positive_int(config, "hidden_size")
    heads = _positive_int(config, "num_attention_heads")
    kv_heads = _positive_int(config, "num_key_value_heads", default=heads)
    head_dim = _positive_int(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise _bad_config(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    if head_dim % 2:
        raise _bad_config(f"head_dim {head_dim} is odd")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        architecture=name,
        layers=_positive_int(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_positive_int(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_positive_int(config, "vocab_size"),
        max_positions=_longest(config, architecture),
        norm_eps=_positive_float(config, "rms_norm_eps"),
        rope=_rope(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture.always_qkv_bias or attention_bias,
        output_bias=attention_bias and not architecture.always_qkv_bias,
        qk_norm=architecture.qk_norm,
    )


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a plain Hugging Face checkpoint, in file order.

    `lm_head.weight` is left out when the embeddings are tied. Linear weights are [out, in].
    """
    hidden, vocab = shape.hidden_size, shape.vocab_size
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(shape.layers):
        block = f"model.layers.{layer}."
        tensors[block + "input_layernorm.weight"] = (hidden,)
        for projection, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            tensors[f"{block}self_attn.{projection}_proj.weight"] = (rows, hidden)
            if shape.qkv_bias:
                tensors[f"{block}self_attn.{projection}_proj.bias"] = (rows,)
        if shape.qk_norm:
            tensors[block + "self_attn.q_norm.weight"] = (shape.head_dim,)
            tensors[block + "self_attn.k_norm.weight"] = (shape.head_dim,)
        tensors[block + "self_attn.o_proj.weight"] = (hidden, q_rows)
        if shape.output_bias:
            tensors[block + "self_attn.o_proj.bias"] = (hidden,)
        tensors[block + "post_attention_layernorm.weight"] = (hidden,)
        tensors[block + "mlp.gate_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[block + "mlp.up_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[block + "mlp.down_proj.weight"] = (hidden, shape.intermediate_size)
    tensors["model.norm.weight"] = (hidden,)
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def is_quantised(tensor: str) -> bool:
    """Whether a weight is stored in FP8: the linear layers of the blocks are, nothing else."""
    return tensor.endswith("_proj.weight")


def unsupported(what: str) -> DraftgateError:
    """The refusal of a model by name, with the list of what is supported."""
    names = ", ".join(SUPPORTED_ARCHITECTURES)
    return DraftgateError(
        ErrorCode.UNIMPLEMENTED, f"{what} is not supported. Supported architectures: {names}"
    )


def _architecture(config: Mapping[str, Any]) -> tuple[str, _Architecture]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        raise unsupported(f"a config.json whose architectures are {names!r}")
    architecture = SUPPORTED_ARCHITECTURES.get(names[0])
    if architecture is None:
        raise unsupported(f"architecture {names[0]}")
    model_type = config.get("model_type")
    if model_type != architecture.model_type:
        raise unsupported(f"{names[0]} with model_type {model_type!r}")
    return names[0], architecture


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Refuse switches of a supported architecture that change arithmetic Draftgate does not do."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise unsupported(f"activation {activation!r}")
    if config.get("mlp_bias"):
        raise unsupported("a bias in the MLP (mlp_bias)")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            raise unsupported(f"a mixture of experts ({key} {config[key]})")
    partial = config.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise unsupported(f"partial rotary embedding (partial_rotary_factor {partial})")
    others = sorted(set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"})
    if others:
        raise unsupported(f"attention layers of type {', '.join(others)}")


def _longest(config: Mapping[str, Any], architecture: _Architecture) -> int:
    """The context length, or the attention window: up to there a window hides nothing."""
    max_positions = _positive_int(config, "max_position_embeddings")
    windowed = not architecture.sliding_window_switch or config.get("use_sliding_window", False)
    if not windowed or config.get("sliding_window") is None:
        return max_positions
    return min(max_positions, _positive_int(config, "sliding_window"))


def _rope(config: Mapping[str, Any]) -> Rope:
    """Scaling is `rope_scaling` in transformers 4, and part of `rope_parameters` in 5."""
    scaling = dict(config.get("rope_scaling") or {})
    scaling.update(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise unsupported("rotary embedding that differs between layers")
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise unsupported(f"partial rotary embedding (partial_rotary_factor {partial})")
    if kind not in SUPPORTED_ROPE:
        raise unsupported(f"rope scaling {kind!r} (supported: {', '.join(SUPPORTED_ROPE)})")
    if theta <= 0:
        raise _bad_config(f"rope_theta {theta} is not positive")
    if kind == "default":
        return Rope(theta)
    factor = _positive_float(scaling, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = scaling.get("original_max_position_embeddings")
    if original is None:
        original = _positive_int(config, "max_position_embeddings")
    if kind == "llama3":
        low = _positive_float(scaling, "low_freq_factor")
        high = _positive_float(scaling, "high_freq_factor")
        if high <= low:
            raise _bad_config(f"high_freq_factor {high} is not above low_freq_factor {low}")
        return Rope(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The given one, or 0.1 ln(factor) + 1 as in the YaRN paper, with DeepSeek's two scales."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(float(mscale)) / magnitude(float(mscale_all))
    return magnitude(1.0)


def _positive_int(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _bad_config(f"{key} is {value!r}, not a positive whole number")
    return value


def _positive_float(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _bad_config(f"{key} is {value!r}, not a positive number")
    return float(value)


def _bad_config(message: str) -> DraftgateError:
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"config.json: {message}")
