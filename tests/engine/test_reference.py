"""The engine against transformers on the same weights, in fp32."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM

from draftgate.engine import Target

NEAR_TIE = 1e-4
"""Top two logits closer than this may be told apart either way by rounding."""


@pytest.fixture(scope="module")
def reference(checkpoint_dir: Path) -> LlamaForCausalLM:
    """The FP8 checkpoint's weights times their scales, in transformers' own Llama."""
    stored = {}
    for path in sorted(checkpoint_dir.glob("*.safetensors")):
        stored.update(load_file(path))
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".weight"):
            scale = stored.get(f"{name}_scale", torch.tensor(1.0))
            weights[name] = tensor.to(torch.float32) * scale.to(torch.float32)
    config = AutoConfig.from_pretrained(checkpoint_dir)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    model.tie_weights()
    return model


@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_transformers(
    reference: LlamaForCausalLM,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
) -> None:
    """One teacher-forced pass per prompt shows, by induction, what greedy decoding gives: at every
    position of our output the reference's argmax must be our token."""
    near_ties, wrong = [], []
    for name, ids in prompts.items():
        emitted = together[name]
        assert len(emitted) == 64
        with torch.inference_mode():
            whole = torch.tensor([ids + emitted[:-1]])
            logits = reference(whole, logits_to_keep=len(emitted)).logits[0]
        assert logits.dtype == torch.float32
        best = logits.topk(2, -1)
        for position, token in enumerate(emitted):
            if int(best.indices[position, 0]) == token:
                continue
            gap = float(best.values[position, 0] - logits[position, token])
            told = f"{name}, output position {position}: logits {gap:.2e} apart"
            (near_ties if gap < NEAR_TIE else wrong).append(told)
    for told in near_ties:
        print("near tie:", told)
    assert not wrong
    assert len(near_ties) <= 5


@pytest.mark.parametrize("name", ["chat-capital", "quote-refrain", "digits-count"])
def test_transformers_generates_the_same(
    reference: LlamaForCausalLM,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    name: str,
) -> None:
    ids = torch.tensor([prompts[name]])
    with warnings.catch_warnings():
        # It warns of sampling settings in the checkpoint that a greedy run does not use.
        warnings.simplefilter("ignore")
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=32,
            min_new_tokens=32,
            eos_token_id=-1,
            pad_token_id=0,
        )
    assert out[0, ids.shape[1] :].tolist() == together[name][:32]


def test_scores_are_the_logits_of_transformers(
    reference: LlamaForCausalLM, target: Target, prompts: dict[str, list[int]]
) -> None:
    ids = prompts["quote-code"]
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0]
    got = target.score(ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-3)
