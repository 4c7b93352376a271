"""The target's logits against transformers on tiny random models, and checkpoints it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftgate.engine import load_target
from draftgate.errors import DraftgateError, ErrorCode
from tests.support.tiny_models import TINY, tiny_tensors, write_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama, one key head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, a key head each": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama, wide heads": ("LlamaForCausalLM", {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "yarn rope": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "yarn rope, other bounds": (
        "LlamaForCausalLM",
        {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral with a window": ("MistralForCausalLM", {"sliding_window": 200}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3 with biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(3)
    config = model_class.config_class(**{**SIZES, **changes})
    if "head_dim" not in config.to_dict():
        config.head_dim = SIZES["head_dim"]
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1, which would hide a swap.
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 120, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0]
    got = load_target(tmp_path, torch.float32).score(ids.tolist())
    assert wanted.std() > 0.05
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    plain = tiny_tensors(TINY)
    stored = dict(plain)
    for name, tensor in plain.items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            plain[name] = stored[name].float() * scale
    fp8 = write_checkpoint(tmp_path / "fp8", TINY, stored)
    quantised = {"quantization": {"quant_algo": "FP8"}}
    (fp8 / "hf_quant_config.json").write_text(json.dumps(quantised))
    target = load_target(fp8, torch.float32)
    assert target.config.quantization == "FP8"
    same = load_target(write_checkpoint(tmp_path / "plain", TINY, plain), torch.float32)
    ids = list(range(50))
    torch.testing.assert_close(target.score(ids), same.score(ids), rtol=1e-5, atol=1e-5)


def test_a_sharded_checkpoint_is_read_whole(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TINY)
    names = sorted(tiny_tensors(TINY))
    sharded = write_checkpoint(tmp_path / "sharded", TINY, {})
    (sharded / "model.safetensors").unlink()
    for index in range(3):
        part = {name: tiny_tensors(TINY)[name] for name in names[index::3]}
        write_checkpoint(tmp_path / "part", TINY, part)
        (tmp_path / "part" / "model.safetensors").rename(sharded / f"model-{index}.safetensors")
    got = load_target(sharded, torch.float32).score([3, 4, 5])
    torch.testing.assert_close(got, load_target(whole, torch.float32).score([3, 4, 5]))


def test_bfloat16_stays_close_to_fp32(tmp_path: Path) -> None:
    """The packed operators over a whole model, also for a step that wants no logits."""
    folder = write_checkpoint(tmp_path / "model", TINY)
    ids = [(7 * i * i + i) % 96 for i in range(200)]
    exact = load_target(folder, torch.float32).score(ids)
    rounded = load_target(folder, torch.bfloat16).score(ids)
    agreed = (exact.argmax(-1) == rounded.argmax(-1)).float().mean()
    assert agreed > 0.9
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.6)


_BIASED = TINY | {"attention_bias": True}
_UNTIED = TINY | {"tie_word_embeddings": False}
_QWEN2 = TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize("config", [TINY, _BIASED, _UNTIED, _QWEN2, _QWEN3])
def test_every_missing_tensor_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the configuration says is there must be: nothing is guessed or left out."""
    whole = tiny_tensors(config)
    for name in whole:
        if ".layers.1." in name:
            continue  # as layer 0
        partial = {other: tensor for other, tensor in whole.items() if other != name}
        folder = write_checkpoint(tmp_path / "model", config, partial)
        with pytest.raises(DraftgateError, match=name) as caught:
            load_target(folder, torch.float32)
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION


@pytest.mark.parametrize("config", [_BIASED, _UNTIED, _QWEN3])
def test_every_wrong_shape_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    whole = tiny_tensors(config)
    for name, tensor in whole.items():
        if ".layers.1." in name:
            continue
        changed = whole | {name: torch.cat([tensor, tensor[:1]])}
        folder = write_checkpoint(tmp_path / "model", config, changed)
        with pytest.raises(DraftgateError, match=name) as caught:
            load_target(folder, torch.float32)
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION
        assert str(list(tensor.shape)) in caught.value.message


def test_an_fp8_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = tiny_tensors(TINY)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    folder = write_checkpoint(tmp_path / "model", TINY, tensors)
    with pytest.raises(DraftgateError, match=f"{name}_scale"):
        load_target(folder, torch.float32)


@pytest.mark.parametrize("kept", [0, 7, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(DraftgateError, match=r"model\.safetensors") as caught:
        load_target(folder, torch.float32)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match=r"config\.json") as caught:
        load_target(tmp_path, torch.float32)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(DraftgateError, match="safetensors") as caught:
        load_target(tmp_path, torch.float32)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_configuration_that_is_not_an_object_is_refused(content: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    (folder / "config.json").write_text(content)
    with pytest.raises(DraftgateError, match=r"config\.json") as caught:
        load_target(folder, torch.float32)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_another_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A16_AWQ"}}')
    with pytest.raises(DraftgateError, match="W4A16_AWQ") as caught:
        load_target(folder, torch.float32)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, (1,)), ({"eos_token_id": [4, 5]}, (4, 5)), ({"eos_token_id": 6}, (6,)), ({}, (1,))],
)
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    generation: dict[str, Any] | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_target(folder, torch.float32).config.eos_token_ids == ids
