"""Writing the head as a Hugging Face EAGLE-3 folder, which TensorRT-LLM, vLLM and SGLang load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftgate.checkpoint import vocabulary_digest
from draftgate.engine import Target
from draftgate.jsonfile import read_object
from training.network import EagleNetwork

__all__ = ["export"]


def export(network: EagleNetwork, vocabulary: torch.Tensor, target: Target, folder: Path) -> None:
    """vocabulary: [draft vocab] the target's ids of the head's tokens, rising."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in network.state_dict().items()
    }
    vocab_size = target.config.shape.vocab_size
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[vocabulary] = True
    tensors["t2d"] = drafted
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = read_object(target.config.folder / "config.json")
    kept = (
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
        "rope_parameters",
        "vocab_size",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "target_vocabulary_sha256": vocabulary_digest(target.config.folder),
        **{name: source[name] for name in kept if source.get(name) is not None},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
