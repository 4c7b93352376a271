from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftgate.checkpoint import SilentProgress, prepare
from draftgate.engine import load_target
from draftgate.errors import DraftgateError

LARGEST_E4M3 = 448.0
IDS = [5, 77, 130, 9, 9, 201, 42, 64, 18, 250, 3, 91]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MODELS = [
    pytest.param("LlamaForCausalLM", {"tie_word_embeddings": True}, id="llama-tied"),
    pytest.param(
        "LlamaForCausalLM", {"attention_bias": True, "rope_parameters": LLAMA3}, id="llama3-bias"
    ),
    pytest.param("MistralForCausalLM", {"sliding_window": None}, id="mistral"),
    pytest.param("Qwen2ForCausalLM", {"rope_parameters": YARN}, id="qwen2-yarn"),
    pytest.param(
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": LINEAR},
        id="qwen3-tied-linear",
    ),
]


@pytest.mark.parametrize(("architecture", "changes"), MODELS)
def test_prepared_model_has_the_layout_and_the_arithmetic_of_its_source(
    architecture: str,
    changes: dict[str, Any],
    make_hf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source, out = make_hf(architecture, **changes), tmp_path / "out"

    prepare(source, out, progress=SilentProgress())

    stored, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    dequantised = {}
    for name, weight in original.items():
        weight = weight.bfloat16().float()
        if not name.endswith("_proj.weight"):
            assert stored[name].dtype == torch.bfloat16
            dequantised[name] = stored[name].float()
            torch.testing.assert_close(dequantised[name], weight, rtol=0, atol=0)
            continue
        assert stored[name].dtype == torch.float8_e4m3fn
        scale = stored[name + "_scale"]
        assert scale.dtype == torch.float32
        assert scale.shape == ()
        assert scale.item() == pytest.approx(weight.abs().max().item() / LARGEST_E4M3, rel=1e-6)
        input_scale = stored[name.removesuffix("weight") + "input_scale"]
        assert input_scale.shape == ()
        assert 0 < input_scale.item() < math.inf
        dequantised[name] = stored[name].float() * scale
        # Half a step: 3 mantissa bits, and 2^-9 between the subnormals.
        bound = torch.maximum(weight.abs() * 2**-4, scale * 2**-10) * 1.0001
        assert ((dequantised[name] - weight).abs() <= bound).all()
    scales = {name for name in stored if name.endswith("_scale")}
    assert len(scales) == 2 * sum(name.endswith("_proj.weight") for name in original)
    assert stored.keys() - scales == original.keys()
    assert ("lm_head.weight" in stored) is not changes.get("tie_word_embeddings", False)

    quantization = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "FP8"
    assert quantization["kv_cache_quant_algo"] is None
    assert "lm_head" in quantization["exclude_modules"]

    _assert_runs_alike(architecture, source, out, dequantised)


def _assert_runs_alike(
    architecture: str, source: Path, out: Path, dequantised: dict[str, torch.Tensor]
) -> None:
    """The weights work in transformers under the written config, and in the engine."""
    model_class = getattr(transformers, architecture)
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["quant_algo"] == "FP8"
    reference = model_class(model_class.config_class.from_dict({**config, "dtype": "float32"}))
    if "lm_head.weight" not in dequantised:
        dequantised["lm_head.weight"] = dequantised["model.embed_tokens.weight"]
    reference.load_state_dict(dequantised)
    original = model_class.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([IDS])).logits[0]
        quantised = reference(torch.tensor([IDS])).logits[0]
    # 4 significant bits in every linear layer: percents, where a wrong tensor gives everything.
    assert (quantised - expected).norm() < 0.1 * expected.norm()
    scored = load_target(out, torch.float32).score(IDS)
    torch.testing.assert_close(scored, quantised, rtol=1e-3, atol=1e-4)


def test_config_is_portable(make_hf: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_hf("LlamaForCausalLM", rope_parameters=LLAMA3), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    config["_name_or_path"] = str(source)
    (source / "config.json").write_text(json.dumps(config))

    prepare(source, out, progress=SilentProgress())

    for file in out.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
    written = json.loads((out / "config.json").read_text())
    # What transformers 4 reads; it does not know rope_parameters.
    assert written["rope_theta"] == LLAMA3["rope_theta"]
    assert written["rope_scaling"] == {
        key: value for key, value in LLAMA3.items() if key != "rope_theta"
    }
    assert "rope_parameters" not in written
    assert written["dtype"] == "bfloat16"


def test_chat_template_inside_the_tokenizer_config_gets_its_own_file(
    make_hf: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = make_hf("LlamaForCausalLM"), tmp_path / "out"
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    prepare(source, out, progress=SilentProgress())

    assert (out / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize("tool", ["torch", "transformers", "modelopt.torch.quantization"])
def test_a_missing_tool_says_how_to_install_it(
    tool: str, make_hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf("LlamaForCausalLM")
    monkeypatch.setitem(sys.modules, tool, None)
    package = tool.partition(".")[0]

    with pytest.raises(
        DraftgateError, match=rf"package {package}; .*pip install 'draftgate\[engine,prepare\]'"
    ):
        prepare(source, tmp_path / "out", progress=SilentProgress())
    assert not (tmp_path / "out").exists()


def test_a_model_with_broken_weights_is_refused(
    make_hf: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = make_hf("LlamaForCausalLM"), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(DraftgateError, match=r"model\.layers\.1\.mlp\.up_proj.* is not finite"):
        prepare(source, out, progress=SilentProgress())
    assert not out.exists()
