"""Tiny random models in both source formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SPECIAL_TOKENS = ("<s>", "</s>")


@pytest.fixture
def make_hf(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny random model as an ordinary Hugging Face folder, in fp32."""

    def make(architecture: str, name: str = "hf", **changes: Any) -> Path:
        folder = tmp_path / name
        torch.manual_seed(7)
        model_class = getattr(transformers, architecture)
        config = model_class.config_class(**{**SIZES, **changes})
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms start at 0 and 1, which would hide a swap.
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write an HF folder's tensors as a GGUF file, with metadata changed or left out."""

    def make(
        folder: Path,
        *,
        pre: str = "gpt-2",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray[Any, Any] | None] | None = None,
    ) -> Path:
        path = tmp_path / "model.gguf"
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture = config.model_type
        fields: dict[str, Any] = {
            f"{architecture}.block_count": config.num_hidden_layers,
            f"{architecture}.context_length": config.max_position_embeddings,
            f"{architecture}.embedding_length": config.hidden_size,
            f"{architecture}.feed_forward_length": config.intermediate_size,
            f"{architecture}.attention.head_count": config.num_attention_heads,
            f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
            f"{architecture}.attention.key_length": SIZES["head_dim"],
            f"{architecture}.attention.value_length": SIZES["head_dim"],
            f"{architecture}.rope.dimension_count": SIZES["head_dim"],
            f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
        fields.update(metadata or {})
        stored: dict[str, np.ndarray[Any, Any] | None] = dict(gguf_tensors(folder, architecture))
        stored.update(tensors or {})
        writer = GGUFWriter(path, fields.pop("general.architecture", architecture))
        for key, value in fields.items():
            if value is not None:
                add_field(writer, key, value)
        tokens, types, merges = gguf_vocabulary()
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        for name, values in stored.items():
            if values is not None:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, a few merges, two special tokens, and unused entries at the end."""
    tokens, _, merges = gguf_vocabulary()
    used = [token for token in tokens if not token.startswith("[unused")]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(used)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def gguf_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: 2 special, 256 bytes, 4 merged, the rest unused."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "1 2"]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2)
    unused = VOCABULARY - len(tokens)
    tokens += [f"[unused{index}]" for index in range(unused)]
    return tokens, [*types, *[TokenType.UNUSED] * unused], merges


def gguf_tensors(folder: Path, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """The folder's tensors under GGUF names, q and k of Llama in llama.cpp's row order."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    renamed = {}
    for name, values in hf_tensors(folder).items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        array = values.numpy()
        if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            array = interleave(array, SIZES["head_dim"])
        renamed[f"{prefix}{names[module]}.{kind}"] = array
    return renamed


def interleave(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order: row 2i of a head is Hugging Face's i, row 2i + 1 its i + head_dim / 2."""
    order = []
    for start in range(0, len(rows), head_dim):
        for index in range(head_dim // 2):
            order += [start + index, start + index + head_dim // 2]
    return np.ascontiguousarray(rows[order])


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
