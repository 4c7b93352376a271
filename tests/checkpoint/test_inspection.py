from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftgate.checkpoint import (
    SilentProgress,
    compare_with_source,
    inspect_checkpoint,
    packaged_source,
    prepare,
)
from draftgate.checkpoint.comparison import agreement
from draftgate.cli.model import model_app
from draftgate.engine import load_target
from draftgate.errors import DraftgateError


def load(folder: Path) -> Callable[..., torch.Tensor]:
    return load_target(folder, torch.float32).score


def test_report_of_the_packaged_model(checkpoint_dir: Path) -> None:
    report = inspect_checkpoint(checkpoint_dir)

    shape = report.shape
    assert shape.architecture == "LlamaForCausalLM"
    assert (shape.layers, shape.hidden_size, shape.intermediate_size) == (30, 576, 1536)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (9, 3, 64)
    assert (shape.vocab_size, shape.max_positions) == (49152, 8192)
    assert (shape.rope.kind, shape.rope.theta) == ("default", 100000.0)
    assert shape.tied_embeddings
    assert report.parameters == 134_515_008
    linear = 30 * (576 * 576 * 2 + 192 * 576 * 2 + 3 * 1536 * 576)
    assert report.bytes_by_dtype == {
        "F8_E4M3": linear,
        "BF16": 2 * (134_515_008 - linear),
        "F32": 2 * 210 * 4,
    }
    assert (report.quantization, report.quantized_layers) == ("FP8", 210)
    assert "lm_head" in report.excluded_modules
    assert report.weight_scales is not None
    assert report.input_scales is not None
    assert report.weight_scales.count == report.input_scales.count == 210
    assert 0 < report.weight_scales.smallest < report.weight_scales.largest < 1
    assert report.tokenizer.tokens == 49152
    assert report.tokenizer.special_tokens == 17
    assert report.tokenizer.has_chat_template
    assert report.source_name == packaged_source().name


def test_the_packaged_model_in_fp8_predicts_like_its_source(checkpoint_dir: Path) -> None:
    measured = compare_with_source(
        checkpoint_dir, packaged_source(), load, progress=SilentProgress()
    )

    assert 400 <= measured.tokens <= 700
    assert measured.top1 > 0.9
    assert 0 < measured.mean_kl_nats < 0.03


def test_an_ordinary_folder_can_be_looked_into(make_hf: Callable[..., Path]) -> None:
    report = inspect_checkpoint(make_hf("Qwen3ForCausalLM"))

    assert (report.quantization, report.quantized_layers) == ("none", 0)
    assert report.weight_scales is None
    assert report.shape.qk_norm
    assert list(report.bytes_by_dtype) == ["F32"]
    assert not report.tokenizer.has_chat_template


def test_a_source_agrees_with_itself(make_hf: Callable[..., Path]) -> None:
    folder = make_hf("MistralForCausalLM", sliding_window=None)

    measured = compare_with_source(folder, folder, load, progress=SilentProgress())

    assert measured.top1 == 1.0
    assert measured.mean_kl_nats == pytest.approx(0, abs=1e-9)


def test_another_model_is_not_the_source(make_hf: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_hf("LlamaForCausalLM"), tmp_path / "out"
    prepare(source, out, progress=SilentProgress())
    other = make_hf("LlamaForCausalLM", "other", num_hidden_layers=3)

    with pytest.raises(DraftgateError, match=r"other: is not the model that .*out was prepared"):
        compare_with_source(out, other, load, progress=SilentProgress())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="is not a model folder"):
        inspect_checkpoint(tmp_path)


def test_agreement_of_distributions_worked_out_by_hand() -> None:
    expected = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]).log()
    actual = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]]).log()

    measured = agreement(expected, actual)

    assert measured.tokens == 2
    assert measured.top1 == 0.5
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert measured.mean_kl_nats == pytest.approx(first / 2)


def test_a_token_that_the_source_rules_out_counts_nothing() -> None:
    expected = torch.tensor([[0.0, -math.inf, 0.0]])
    actual = torch.tensor([[0.0, 1.0, 0.0]])

    assert agreement(expected, actual).mean_kl_nats == pytest.approx(math.log((2 + math.e) / 2))


@given(
    st.lists(
        st.lists(st.floats(-20, 20), min_size=5, max_size=5).map(tuple), min_size=2, max_size=6
    )
)
def test_divergence_is_never_negative_and_ignores_shifts(
    rows: list[tuple[float, ...]],
) -> None:
    logits = torch.tensor(rows, dtype=torch.float64)
    other = logits.flip(0)

    assert agreement(logits, other).mean_kl_nats >= -1e-12
    assert agreement(logits, logits + 3).mean_kl_nats == pytest.approx(0, abs=1e-12)


def test_prepare_and_inspect_from_the_command_line(
    make_hf: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = make_hf("LlamaForCausalLM"), tmp_path / "out"
    runner = CliRunner()

    made = runner.invoke(model_app, ["prepare", "--from", str(source), "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines() == [
        f"{out} is ready. See what is in it: draftgate model inspect {out}"
    ]
    assert "quantising" in made.stderr.splitlines()
    again = runner.invoke(model_app, ["prepare", "--from", str(source), "--out", str(out)])
    assert again.stderr.splitlines() == ["checking"]

    shown = runner.invoke(model_app, ["inspect", str(out), "--source", str(source)])
    assert shown.exit_code == 0, shown.output
    rows = dict(line.split("\t") for line in shown.stdout.splitlines() if "\t" in line)
    assert rows["architecture"] == "LlamaForCausalLM"
    assert rows["quantisation"] == "FP8, 14 linear layers"
    assert rows["chat template"] == "no"
    assert rows["same top token"].endswith("%")
    assert rows["mean KL"].endswith(" nats/token")
    assert "activations left as they are" in shown.stdout

    parsed = json.loads(
        runner.invoke(model_app, ["inspect", str(out), "--source", str(source), "--json"]).stdout
    )
    assert parsed["shape"]["layers"] == 2
    assert parsed["quantization"] == "FP8"
    assert 0 <= parsed["agreement"]["top1"] <= 1


def test_commands_fail_with_the_reason(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    result = CliRunner().invoke(
        model_app, ["prepare", "--from", absent, "--out", str(tmp_path / "out")]
    )

    assert isinstance(result.exception, DraftgateError)
    assert "no such file or folder" in result.exception.message
