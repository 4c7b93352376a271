from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgate.checkpoint.architectures import SUPPORTED_ARCHITECTURES, model_shape
from draftgate.checkpoint.source import open_source
from draftgate.errors import DraftgateError, ErrorCode

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

NOT_SUPPORTED: list[Any] = [
    ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
    ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    ({"architectures": []}, r"architectures are \[\]"),
    ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures are"),
    ({"architectures": None}, "architectures are"),
    ({"model_type": "custom"}, "model_type 'custom'"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"num_local_experts": 8}, "num_local_experts 8"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
]
NOT_SOUND: list[Any] = [
    ({"hidden_size": None}, "hidden_size is None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"vocab_size": -5}, "vocab_size is -5"),
    ({"vocab_size": 3.5}, "vocab_size is 3.5"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ({"rope_theta": -1.0}, "rope_theta -1.0"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
        "high_freq_factor 1.0 is not above",
    ),
]


@pytest.mark.parametrize(("change", "message"), NOT_SUPPORTED)
def test_an_unsupported_model_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftgateError, match=message) as refusal:
        model_shape({**CONFIG, **change})
    assert refusal.value.code is ErrorCode.UNIMPLEMENTED
    for name in SUPPORTED_ARCHITECTURES:
        assert name in refusal.value.message


@pytest.mark.parametrize(("change", "message"), NOT_SOUND)
def test_impossible_numbers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftgateError, match=message) as refusal:
        model_shape({**CONFIG, **change})
    assert refusal.value.code is ErrorCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 256),
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 1024}, 256),
        ({**QWEN2, "sliding_window": 64}, 256),
        ({**QWEN2, "sliding_window": 64, "use_sliding_window": True}, 64),
    ],
)
def test_context_ends_where_an_attention_window_would_begin(
    change: dict[str, Any], longest: int
) -> None:
    assert model_shape({**CONFIG, **change}).max_positions == longest


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    old = model_shape({**CONFIG, "rope_theta": 5e5, "rope_scaling": scaling})
    new = model_shape({**CONFIG, "rope_parameters": {**scaling, "rope_theta": 5e5}})

    assert old == new
    assert (old.rope.theta, old.rope.beta_fast, old.rope.beta_slow) == (5e5, 16.0, 1.0)
    ratio = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert old.rope.attention_factor == pytest.approx(ratio)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def edit_tensor(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors")

    return edit


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


UP = "model.layers.0.mlp.up_proj.weight"
BROKEN_FOLDERS: list[Any] = [
    (remove("config.json"), "has no config.json; give a GGUF file or a model folder"),
    (remove("model.safetensors"), "has no model.safetensors; only safetensors"),
    (remove("tokenizer.json"), "has no tokenizer.json; write one with transformers"),
    (write("config.json", "{"), "config.json: is not valid JSON"),
    (write("config.json", "[]"), "config.json: does not hold a JSON object"),
    (write("model.safetensors.index.json", '{"weight_map": {"a": "b.st"}}'), "has no b.st"),
    (write("model.safetensors.index.json", "{}"), "has no weight_map"),
    (write("hf_quant_config.json", "{}"), "is already quantised"),
    (edit_config(quantization_config={"quant_method": "fp8"}), "is already quantised"),
    (edit_config(num_hidden_layers=3), "layers.2.input_layernorm.weight is missing"),
    (edit_config(intermediate_size=128), r"has shape \[64, 96\], .* implies \[64, 128\]"),
    (edit_tensor(UP, None), r"up_proj.weight is missing \(1 in all\)"),
    (edit_tensor(UP, torch.zeros(64, 96)), r"has shape \[64, 96\]"),
    (edit_tensor(UP, torch.zeros(96, 64, dtype=torch.int8)), "is I8, not one of F32"),
    (edit_tensor("model.layers.0.mlp.router.weight", torch.zeros(4)), "router.weight"),
    (truncate, "cannot be read as safetensors"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN_FOLDERS)
def test_a_broken_folder_is_refused(
    damage: Callable[[Path], None], message: str, make_hf: Callable[..., Path]
) -> None:
    folder = make_hf("LlamaForCausalLM")
    damage(folder)

    with pytest.raises(DraftgateError, match=message):
        open_source(folder)


def test_a_redundant_copy_of_tied_embeddings_is_ignored(make_hf: Callable[..., Path]) -> None:
    folder = make_hf("LlamaForCausalLM", tie_word_embeddings=True)
    edit_tensor("lm_head.weight", torch.zeros(300, 64))(folder)

    names = [name for name, _ in open_source(folder).tensors()]

    assert "lm_head.weight" not in names


def test_nothing_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="no such file or folder") as refusal:
        open_source(tmp_path / "absent")
    assert refusal.value.code is ErrorCode.NOT_FOUND
