"""A GGUF file as a source: metadata to `config.json`, tensors back to Hugging Face's layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgate.checkpoint.architectures import (
    ModelShape,
    model_shape,
    tensor_shapes,
    unsupported,
)
from draftgate.checkpoint.files import bad_file
from draftgate.checkpoint.gguf_tokenizer import GgufTokenizer
from draftgate.checkpoint.source import check_shape, import_prepare_tool

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

__all__ = ["GgufSource"]

_ARCHITECTURES = {
    # Mistral models are written as "llama" too: the arithmetic is the same.
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MODEL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """A GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model with a byte-level BPE tokenizer.

    Raises `DraftgateError` when the file is broken, incomplete or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _read(path)
        self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_container()
        self.config: Mapping[str, Any] = self._make_config()
        self.shape: ModelShape = model_shape(self.config)
        self._check_tensors()
        self._tokenizer = GgufTokenizer(path, self._metadata)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The special token ids; GGUF carries no sampling defaults that a server should follow."""
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {key: self.config[key] for key in keys if key in self.config}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Dequantise to fp32, one tensor at a time."""
        import torch
        from gguf import dequantize

        for name in tensor_shapes(self.shape):
            stored = self._tensors[_gguf_name(name)]
            try:
                values = dequantize(stored.data, stored.tensor_type)
            except NotImplementedError as error:
                raise unsupported(f"GGUF tensor type {stored.tensor_type.name}") from error
            yield name, torch.from_numpy(self._unpermute(name, values).copy())

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer that the metadata describe."""
        self._tokenizer.write(folder, max_positions=self.shape.max_positions)

    def _unpermute(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Undo llama.cpp's row order of q and k, made for rotating neighbouring dimensions.

        Hugging Face rotates dimension i with i + head_dim / 2; llama.cpp keeps that order for
        Qwen and interleaves the two halves of each head for Llama.
        """
        heads = {"q_proj": self.shape.heads, "k_proj": self.shape.kv_heads}
        module = name.split(".")[-2]
        if self.shape.architecture != "LlamaForCausalLM" or module not in heads:
            return values
        halves = values.reshape(heads[module], self.shape.head_dim // 2, 2, -1)
        return halves.swapaxes(1, 2).reshape(values.shape)

    def _check_container(self) -> None:
        parts = self._metadata.get("split.count", 1)
        if parts > 1:
            raise bad_file(
                self.path, f"is one of {parts} parts; merge them first (llama-gguf-split --merge)"
            )
        architecture = self._required("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise unsupported(f"GGUF architecture {architecture!r}")
        experts = self._get("expert_count", 0)
        if experts:
            raise unsupported(f"a mixture of experts ({experts} experts)")

    def _make_config(self) -> dict[str, Any]:
        """`config.json` in the form that transformers 4 and 5 both read."""
        name = _ARCHITECTURES[self._metadata["general.architecture"]]
        heads = self._required_size("attention.head_count")
        hidden = self._required_size("embedding_length")
        kv_heads = self._get("attention.head_count_kv", heads)
        if isinstance(kv_heads, list):
            raise unsupported("a number of key-value heads that differs between layers")
        head_dim = self._get("attention.key_length", hidden // heads)
        value_dim = self._get("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise unsupported(f"values of {value_dim} dimensions beside keys of {head_dim}")
        rotated = self._get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise unsupported(f"partial rotary embedding ({rotated} of {head_dim} dimensions)")
        context = self._required_size("context_length")
        # Up to its window's length, sliding-window attention is full attention.
        context = min(context, self._get("attention.sliding_window", context))
        config: dict[str, Any] = {
            "architectures": [name],
            "model_type": name.removesuffix("ForCausalLM").lower(),
            "dtype": "bfloat16",
            "vocab_size": len(self._required("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": self._required_size("feed_forward_length"),
            "num_hidden_layers": self._required_size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            # GGUF stores fp32: 1e-5 comes back as 9.999999747378752e-06.
            "rms_norm_eps": _shortest_fp32(self._required_size("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest_fp32(self._get("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim, context),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_dropout": 0.0,
            "use_cache": True,
        }
        if name != "Qwen2ForCausalLM":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        config.update(self._special_ids())
        return config

    def _special_ids(self) -> dict[str, int | list[int]]:
        ids: dict[str, int | list[int]] = {}
        for ours, theirs in (("bos", "bos"), ("pad", "padding")):
            value = self._metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if value is not None:
                ids[f"{ours}_token_id"] = value
        ends = [
            self._metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in self._metadata
        ]
        ends = list(dict.fromkeys(ends))
        if not ends:
            raise bad_file(self.path, "has no tokenizer.ggml.eos_token_id")
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        return ids

    def _rope_scaling(self, head_dim: int, context: int) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(head_dim)
        legacy = self._get("rope.scale_linear", None)
        kind = self._get("rope.scaling.type", "none" if legacy is None else "linear")
        factor = self._get("rope.scaling.factor", legacy)
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._get(
                "rope.scaling.original_context_length", context
            )
            for ours, theirs in (
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ):
                value = self._get(f"rope.scaling.{theirs}", None)
                if value is not None:
                    scaling[ours] = _shortest_fp32(value)
            for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
                value = self._get(f"rope.scaling.{key}", 1.0)
                if value != 1.0:
                    raise unsupported(f"yarn rope scaling with {key} {value}")
        return scaling

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """GGUF keeps llama3 scaling as one divisor per frequency: find the rule that made them.

        Every published model uses low 1, high 4 and 8192 original positions; only the factor
        differs, and it is the largest divisor. The guess is checked against all divisors.
        """
        stored = [float(value) for value in self._tensors[_ROPE_FACTORS].data.reshape(-1)]
        scaling = {
            "rope_type": "llama3",
            "factor": _shortest_fp32(max(stored, default=1.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = self._get("rope.freq_base", 10000.0)
        made = llama3_divisors(theta, head_dim, scaling)
        if len(made) != len(stored) or any(
            not math.isclose(ours, theirs, rel_tol=1e-3)
            for ours, theirs in zip(made, stored, strict=True)
        ):
            raise unsupported("a table of rope frequency factors that is not llama3 scaling")
        return scaling

    def _check_tensors(self) -> None:
        wanted = tensor_shapes(self.shape)
        for name, shape in wanted.items():
            stored = self._tensors.get(_gguf_name(name))
            if stored is None:
                raise bad_file(self.path, f"tensor {_gguf_name(name)} is missing")
            # GGUF counts dimensions from the fastest.
            check_shape(self.path, stored.name, tuple(map(int, stored.shape[::-1])), shape)
        known = {_gguf_name(name) for name in wanted} | {_ROPE_FACTORS}
        extra = sorted(set(self._tensors) - known)
        if extra:
            raise unsupported(f"a {self.shape.architecture} GGUF with tensor {extra[0]}")

    def _get(self, key: str, default: Any) -> Any:
        """Metadata of the architecture, such as `llama.block_count`."""
        return self._metadata.get(f"{self._metadata['general.architecture']}.{key}", default)

    def _required_size(self, key: str) -> Any:
        value = self._required(f"{self._metadata['general.architecture']}.{key}")
        if isinstance(value, list):
            raise unsupported(f"{key} that differs between layers")
        return value

    def _required(self, key: str) -> Any:
        if key not in self._metadata:
            raise bad_file(self.path, f"metadata {key} is missing")
        return self._metadata[key]


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> list[float]:
    """What llama3 scaling divides each of the head_dim / 2 frequencies by."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _read(path: Path) -> GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise bad_file(path, "is not a GGUF file; give a .gguf file or a Hugging Face folder")
    gguf = import_prepare_tool("gguf")
    try:
        reader: GGUFReader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # What numpy raises from reading past the end, and the reader from what it finds instead.
        raise bad_file(
            path, "is truncated or damaged; fetch it again and compare its checksum"
        ) from error
    if (reader.byte_order == "S") == (sys.byteorder == "little"):
        raise unsupported("a big-endian GGUF file")
    return reader


def _gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` to `blk.0.ffn_up.weight`."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_BLOCK_MODULES[module]}.{kind}"


def _shortest_fp32(value: float) -> float:
    """The number with the fewest digits that is the same in fp32."""
    import numpy as np

    return float(str(np.float32(value)))
