"""Medusa heads: which token each foretells, from which state, and what they change: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from draftgate.contract import DraftSource, GateReason
from draftgate.engine import Engine, EngineConfig, Target, load_target
from draftgate.engine.drafters import Draft, MedusaDrafter, MedusaHeads, Settled
from draftgate.errors import DraftgateError
from draftgate.sampling import SamplingParams, Verification
from tests.support.drafters import (
    CHANCES,
    SETTINGS,
    check_distribution,
    check_lossless,
    query,
    refusal,
)
from tests.support.engine import greedy, running, sampled
from tests.support.tiny_models import BLOCK_BYTES, TINY, tiny_tensors, write_checkpoint

SUCCESSORS = TINY | {"vocab_size": 48, "tie_word_embeddings": False}
"""A model in which every token has one successor."""

HEADS = 3


def write_heads(
    folder: Path,
    config: dict[str, Any],
    outputs: list[torch.Tensor],
    layers: int = 1,
    seed: int = 0,
) -> Path:
    """Heads with these output layers [vocab, hidden] over random residual blocks; seed -1: over
    blocks that add nothing."""
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(max(seed, 0))
    tensors = {}
    for head, output in enumerate(outputs):
        for layer in range(layers):
            weight = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
            bias = torch.randn(hidden, generator=generator)
            tensors[f"{head}.{layer}.linear.weight"] = weight if seed >= 0 else weight * 0
            tensors[f"{head}.{layer}.linear.bias"] = bias if seed >= 0 else bias * 0
        tensors[f"{head}.{layers}.weight"] = output.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {"hidden_size": hidden, "vocab_size": config["vocab_size"]}
    change_config(folder, {"medusa_num_heads": len(outputs), "medusa_num_layers": layers, **sizes})
    return folder


def change_config(folder: Path, changed: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changed))


def rename(folder: Path, prefix: str) -> None:
    path = folder / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)


def steps_on(count: int) -> torch.Tensor:
    """[48, 48]: of the normed state of token t, which is negative, logits for token t + count."""
    return -torch.eye(48).roll(count, 0)


@pytest.fixture
def successors(tmp_path: Path) -> Target:
    """After token t comes t + 1: the layers add nothing, so the state is the token's own."""
    tensors = tiny_tensors(SUCCESSORS)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0
    tensors["model.embed_tokens.weight"] = torch.eye(48)
    tensors["lm_head.weight"] = steps_on(1)
    # A state before this norm would foretell the wrong tokens.
    tensors["model.norm.weight"] = -torch.ones(48)
    return load_target(write_checkpoint(tmp_path / "model", SUCCESSORS, tensors), torch.float32)


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """For the tiny target: heads that say its next token once more, right when it repeats it."""
    head = tiny_tensors(TINY)["model.embed_tokens.weight"]
    return write_heads(tmp_path / "heads", TINY, [head] * HEADS, seed=-1)


# Offsets


@pytest.mark.parametrize(
    "params", [greedy(41), sampled(41, seed=3, temperature=0.1), sampled(41, temperature=0.1)]
)
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_head_k_foretells_the_token_k_after_the_targets_own(
    successors: Target, tmp_path: Path, off: int, params: SamplingParams
) -> None:
    """Counted from 1: the state of token t gives t + 1, and head k t + 1 + k. One more or less and
    nothing stands."""
    outputs = [steps_on(head + 2 + off) * 5 for head in range(HEADS)]
    folder = write_heads(tmp_path / "heads", SUCCESSORS, outputs, seed=-1)
    prompts = {"a": (4, 9, 2), "b": (7,), "c": tuple(range(40, 0, -1))}
    with running(successors, drafter="medusa", drafter_dir=str(folder), draft_len=6) as engine:
        streams = {name: engine.submit(name, ids, params) for name, ids in prompts.items()}
        for name, stream in streams.items():
            stream.wait()
            assert stream.tokens == [(prompts[name][-1] + 1 + i) % 48 for i in range(41)]
            assert stream.accepted == (stream.drafted if off == 0 else 0)
            drafts = [o.verify_step for o in stream.outputs if o.verify_step]
            assert {step.source for step in drafts} == {DraftSource.MEDUSA}
            if off == 0:
                # As many as there are heads, though more were asked for.
                assert [len(output.token_ids) for output in stream.outputs] == [1] + [4] * 10


def test_a_request_caps_its_drafts(successors: Target, tmp_path: Path) -> None:
    outputs = [steps_on(head + 2) for head in range(HEADS)]
    folder = write_heads(tmp_path / "heads", SUCCESSORS, outputs, seed=-1)
    with running(successors, drafter="medusa", drafter_dir=str(folder), draft_len=6) as engine:
        streams = {
            cap: engine.submit(f"{cap}", (cap, 5), greedy(30, max_draft_len=cap))
            for cap in (0, 1, 2, 5)
        }
        for cap, stream in streams.items():
            assert stream.wait().tokens == [(6 + i) % 48 for i in range(30)]
            lens = [len(o.verify_step.draft_ids) for o in stream.outputs if o.verify_step]
            assert max(lens, default=0) == min(cap, HEADS)
            assert stream.accepted == stream.drafted


# Losslessness


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_changes_no_token(tiny: Target, heads: Path, setting: str) -> None:
    check_lossless(tiny, "medusa", heads, BLOCK_BYTES, SETTINGS[setting])


@pytest.mark.parametrize("chance", CHANCES)
def test_sampled_sequences_have_the_targets_distribution(
    tmp_path: Path, chance: dict[str, Any]
) -> None:
    config = TINY | {"vocab_size": 6}
    target = load_target(write_checkpoint(tmp_path / "model", config), torch.float32)
    outputs = [torch.randn(6, 48, generator=torch.Generator().manual_seed(5)) / 7 for _ in "12"]
    folder = write_heads(tmp_path / "heads", config, outputs)
    check_distribution(target, "medusa", folder, chance)


# The heads


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_a_head_is_residual_blocks_and_an_output(
    tiny: Target, tmp_path: Path, layers: int, prefix: str
) -> None:
    outputs = list(torch.randn(HEADS, 96, 48, generator=torch.Generator().manual_seed(1)))
    folder = write_heads(tmp_path / "heads", TINY, outputs, layers)
    tensors = load_file(folder / "model.safetensors")
    if prefix:
        rename(folder, prefix)
    heads = MedusaHeads(folder, tiny)
    assert len(heads) == HEADS
    hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    for head in range(HEADS):
        x = hidden
        for layer in range(layers):
            name = f"{head}.{layer}.linear."
            x = x + F.silu(F.linear(x, tensors[name + "weight"], tensors[name + "bias"]))
        wanted = F.linear(x, tensors[f"{head}.{layers}.weight"])
        torch.testing.assert_close(heads.logits(head, hidden), wanted, rtol=1e-4, atol=1e-4)


def test_in_bf16_it_drafts_the_same(successors: Target, tmp_path: Path) -> None:
    """With the padding and the packed layers that bf16 has on a CPU."""
    outputs = [steps_on(head + 2) for head in range(HEADS)]
    folder = write_heads(tmp_path / "heads", SUCCESSORS, outputs, seed=-1)
    target = load_target(successors.config.folder, torch.bfloat16)
    with running(
        target, dtype="bfloat16", drafter="medusa", drafter_dir=str(folder), draft_len=3
    ) as engine:
        streams = [engine.submit(f"{i}", (i,), greedy(21)) for i in range(19)]
        for stream in streams:
            assert stream.wait().accepted == stream.drafted > 0


def test_it_reads_the_state_behind_the_final_norm(tiny: Target, heads: Path) -> None:
    """The taps' output of the last layer, normed, gives the target's own logits."""
    ids = [5, 17, 80, 3]
    normed = tiny.normed(tiny.features(ids, [2]))
    head = tiny_tensors(TINY)["model.embed_tokens.weight"]
    torch.testing.assert_close(F.linear(normed, head), tiny.score(ids), rtol=1e-4, atol=1e-4)
    drafter = MedusaDrafter(MedusaHeads(heads, tiny), tiny)
    assert drafter.taps == (2,)
    drafter.observe([Settled(0, 0, [*ids, 9], 0, 4, range(4), Draft())], tiny.features(ids, [2]))
    [draft] = drafter.propose([query([*ids, 9], 3)])
    assert draft.token_ids == (int(tiny.score(ids)[-1].argmax()),) * 3


# What is known of a row


@torch.inference_mode()
def test_without_a_fresh_state_nothing_is_drafted(tiny: Target, heads: Path) -> None:
    drafter = MedusaDrafter(MedusaHeads(heads, tiny), tiny)
    assert drafter.kv_shape is None
    assert drafter.propose([]) == []
    ids = [5, 17, 80, 3, 44, 21]
    features = tiny.features(ids, drafter.taps)

    def drafted(upto: int) -> int:
        [draft] = drafter.propose([query(ids[:upto], 2)])
        return len(draft.token_ids)

    assert drafted(6) == 0
    drafter.observe(
        [Settled(0, 0, ids, 0, 3, range(3), Draft())], features[:3]
    )  # half of its prompt
    assert drafter.synced_upto(0) == 4
    assert [drafted(upto) for upto in (3, 4, 5, 6)] == [0, 2, 0, 0]
    drafter.observe([Settled(0, 0, ids, 3, 5, [1, 2], Draft())], features[2:5])
    assert drafter.synced_upto(0) == 6
    assert [drafted(upto) for upto in (5, 6)] == [0, 2]
    assert drafter.propose([query(ids, 2, row_id=1)])[0].token_ids == ()
    drafter.reset(0)
    drafter.reset(0)
    assert (drafter.synced_upto(0), drafted(6)) == (0, 0)


@torch.inference_mode()
def test_each_row_has_the_state_of_its_last_settled_position(tiny: Target, heads: Path) -> None:
    """Of a pass with two rows: one whose drafts stand in part, and one half-way in its prompt."""
    drafter = MedusaDrafter(MedusaHeads(heads, tiny), tiny)
    one, two = [5, 17, 80, 3, 44, 21], list(range(30, 50))
    packed = torch.cat([tiny.features([*one[:5], 7, 8], [2])[2:], tiny.features(two[:9], [2])])
    # Drafted 3, 44, 7, 8 after 80; 3 and 44 stood.
    draft = Draft((3, 44, 7, 8), DraftSource.MEDUSA)
    rows = [
        Settled(0, 1, one, 2, 5, range(3), draft),
        Settled(1, 0, two, 0, 9, range(5, 14), Draft()),
    ]
    drafter.observe(rows, packed)
    drafts = drafter.propose([query(two[:10], 1, row_id=1), query(one, 2)])
    assert [d.token_ids for d in drafts] == [
        (int(tiny.score(two[:9])[-1].argmax()),),
        (int(tiny.score(one[:5])[-1].argmax()),) * 2,
    ]


@torch.inference_mode()
def test_a_drawn_draft_tells_its_distributions(tiny: Target, heads: Path) -> None:
    drafter = MedusaDrafter(MedusaHeads(heads, tiny), tiny)
    ids = [5, 17, 80, 3]
    features = tiny.features(ids, [2])
    row = Settled(0, 0, [*ids, 9], 0, 4, range(4), Draft())
    drafter.observe([row], features)
    drawn = sampled(9, temperature=1.5, top_k=7, verification=Verification.REJECTION)
    [told] = drafter.propose([query([*ids, 9], 3, params=drawn)])
    assert told.vocabulary is None
    assert told.probabilities is not None
    p = (tiny.score(ids)[-1] / 1.5).softmax(-1)
    p = p.where(p >= p.topk(7).values[-1], 0.0)
    torch.testing.assert_close(
        told.probabilities, (p / p.sum()).expand(3, -1), rtol=1e-4, atol=1e-5
    )
    assert all(told.probabilities[i, token] > 0 for i, token in enumerate(told.token_ids))
    for params in (greedy(9), sampled(9, seed=4)):
        [draft] = drafter.propose([query([*ids, 9], 3, params=params)])
        assert len(draft.token_ids) == 3
        assert draft.probabilities is None


def test_steps_after_the_prompt_all_draft(tiny: Target, heads: Path) -> None:
    with running(tiny, drafter="medusa", drafter_dir=str(heads), draft_len=2) as engine:
        stream = engine.one((1, 2, 3), greedy(20))
    assert stream.gate_reasons <= {GateReason.PREFILL, GateReason.FIXED, GateReason.BUDGET}


# Refused


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"hidden_size": 64}, "the drafter's hidden_size is 64, the target's is 48"),
        ({"vocab_size": 95}, "the drafter's vocab_size is 95, the target's is 96"),
        ({"vocab_size": None}, "the drafter's vocab_size is None, the target's is 96"),
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0, not an integer of at least 1"),
        ({"medusa_num_heads": "3"}, "medusa_num_heads is 3, not an integer of at least 1"),
        ({"medusa_num_heads": None}, "medusa_num_heads is None, not an integer of at least 1"),
        ({"medusa_num_layers": -1}, "medusa_num_layers is -1, not an integer of at least 0"),
        ({"medusa_num_heads": 4}, " lacks the tensor 3.0.linear.weight"),
        ({"medusa_num_layers": 2}, " 0.1.linear.weight"),
        ({"medusa_num_layers": 0}, " lacks the tensor 0.0.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tiny: Target, heads: Path, changed: dict[str, Any], wanted: str
) -> None:
    change_config(heads, changed)
    message = refusal("medusa", heads, tiny)
    assert message.startswith(str(heads))
    assert message.endswith(wanted)


def test_a_missing_bias_is_refused(tiny: Target, heads: Path) -> None:
    path = heads / "model.safetensors"
    tensors = load_file(path)
    del tensors["1.0.linear.bias"]
    save_file(tensors, path)
    assert refusal("medusa", heads, tiny) == f"{heads} lacks the tensor 1.0.linear.bias"


def test_another_shape_is_refused(tiny: Target, heads: Path) -> None:
    path = heads / "model.safetensors"
    save_file(load_file(path) | {"2.1.weight": torch.zeros(48, 96)}, path)
    assert "2.1.weight has shape [48, 96]" in refusal("medusa", heads, tiny)


def test_another_tokenizer_is_refused(tmp_path: Path, heads: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    target = load_target(folder, torch.float32)
    MedusaHeads(heads, target)  # they tell of none
    change_config(heads, {"target_vocabulary_sha256": "0123456789abcdef"})
    message = refusal("medusa", heads, target)
    assert ": the drafter was made for the tokenizer 0123456789ab, the target's is " in message


def test_a_folder_is_needed(tiny: Target, tmp_path: Path) -> None:
    assert "config.json" in refusal("medusa", tmp_path / "nowhere", tiny)
    with pytest.raises(DraftgateError, match=r"drafter_dir.*'medusa' needs"):
        Engine(tiny, EngineConfig(drafter="medusa"))
