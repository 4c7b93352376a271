"""The engine benchmark runs, reports what it says it does, and fails when a goal is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import engine_step
from engine_step import Bounds, Plan, Report

_SCRIPT = Path(engine_step.__file__)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_PLAN = Plan(
    rounds=2,
    sizes=(1, 2, 4),
    cached_tokens=20,
    buffer_bytes=1 << 20,
    kv_rows=2,
    kv_budget_bytes=1 << 16,
    short_requests=12,
    short_rows=4,
)
_LOOSE = Bounds(
    step_to_floor=float("inf"),
    weight_copies=float("inf"),
    kv_share_low=float("-inf"),
    kv_share_high=float("inf"),
    short_growth=float("inf"),
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two narrow layers with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
            prefix + "self_attn.q_proj.weight": (64, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 64),
            prefix + "mlp.gate_proj.weight": (96, 64),
            prefix + "mlp.up_proj.weight": (96, 64),
            prefix + "mlp.down_proj.weight": (64, 96),
        }
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(tiny_model: Path) -> Callable[..., int]:
    """The benchmark's `main` on the tiny model."""

    def run_main(*options: str, bounds: Bounds = _LOOSE) -> int:
        return engine_step.main(["--model-dir", str(tiny_model), *options], bounds, _PLAN)

    return run_main


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, str(_SCRIPT), "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--json", "--quick", "--check"):
        assert option in shown


def test_json_holds_every_measurement(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--check", "--json", str(tmp_path / "report.json")) == 0
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(content) == {*Report.__dataclass_fields__, "goals"}
    assert [(step["rows"], step["tokens_per_row"]) for step in content["steps"]] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (1, 2),
        (1, 4),
    ]
    for step in content["steps"]:
        assert 0 < step["time"]["p10_ms"] <= step["time"]["median_ms"] <= step["time"]["p90_ms"]
        assert step["to_floor"] == pytest.approx(step["time"]["median_ms"] / content["floor_ms"])
    weights = 2 * (2 * (2 * 6 * 16 * 64 + 3 * 64 * 96) + 128 * 64)
    assert content["weights"]["weight_bytes"] == weights
    seconds_a_read = weights / content["bandwidth"]["bytes_per_s"]
    assert content["floor_ms"] == pytest.approx(seconds_a_read * 1e3)
    assert content["bandwidth"]["bytes_per_s"] == max(
        content["bandwidth"]["all_bytes_per_s"].values()
    )
    # A block is 16 positions of keys and values, 2 heads of 16 in bf16, in two layers.
    assert content["kv_cache"]["total_blocks"] == (1 << 16) // (16 * 2 * 2 * 16 * 2 * 2)
    assert content["kv_cache"]["used_blocks"] <= content["kv_cache"]["total_blocks"]
    assert content["short_requests"]["requests"] == 12
    assert all(goal["met"] for goal in content["goals"])


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [
        (replace(_LOOSE, step_to_floor=0.0), "step at 1 row / floor"),
        (replace(_LOOSE, weight_copies=float("-inf")), "weights resident / weights"),
        (replace(_LOOSE, kv_share_low=float("inf")), "KV cache resident / budget"),
        (replace(_LOOSE, short_growth=float("-inf")), "growth over short requests"),
    ],
)
def test_check_fails_on_a_missed_goal_and_prints_it_last(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], bounds: Bounds, missed: str
) -> None:
    assert run("--check", bounds=bounds) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"MISSED {missed}: ")


def test_without_check_a_missed_goal_is_only_shown(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bounds=replace(_LOOSE, step_to_floor=0.0)) == 0
    assert "MISSED step at 1 row / floor" in capsys.readouterr().out


@pytest.mark.slow
def test_quick_run_on_the_packaged_model(checkpoint_dir: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            str(_SCRIPT),
            "--quick",
            "--model-dir",
            str(checkpoint_dir),
            "--json",
            str(report),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    content = json.loads(report.read_text(encoding="utf-8"))
    assert [step["rows"] for step in content["steps"]][:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert "Floor: 269 MB of weights" in done.stdout
