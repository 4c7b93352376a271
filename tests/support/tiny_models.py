"""Tiny checkpoints with random weights, written straight to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftgate.checkpoint.architectures import model_shape, tensor_shapes

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

BLOCK_BYTES = 16 * 2 * TINY["num_key_value_heads"] * TINY["head_dim"] * 4 * 2
"""One block of its KV cache: 16 positions of keys and values in fp32, both layers."""


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights whose logits lie well apart: hidden states neither vanish nor explode."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(model_shape(config)).items():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * drawn
        elif len(shape) == 1:
            tensors[name] = 0.1 * drawn
        else:
            tensors[name] = drawn / shape[1] ** 0.5
    return tensors


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        tensors if tensors is not None else tiny_tensors(config), folder / "model.safetensors"
    )
    return folder
