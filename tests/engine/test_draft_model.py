"""A smaller model that drafts: what it is fed, what its cache holds; it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgate.contract import DraftSource, GateReason
from draftgate.engine import Engine, EngineConfig, Target, load_target
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft, DraftModelDrafter, DraftQuery, Settled, draft_model
from draftgate.engine.kv_cache import KVCache, KVStore
from draftgate.errors import DraftgateError
from draftgate.sampling import SamplingParams, Verification
from tests.support.drafters import (
    CHANCES,
    PROMPTS,
    SETTINGS,
    check_distribution,
    check_lossless,
    query,
    refusal,
)
from tests.support.engine import greedy, running, sampled, use_drafter
from tests.support.tiny_models import BLOCK_BYTES, TINY, tiny_tensors, write_checkpoint

TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """The tiny target once more."""
    return write_checkpoint(tmp_path / "twin", TINY)


@pytest.fixture
def cousin(tmp_path: Path) -> Path:
    """One layer of the target, not quite as it is: right now and then."""
    config = TINY | {"num_hidden_layers": 1}
    tensors = {
        name: tensor for name, tensor in tiny_tensors(TINY).items() if ".layers.1." not in name
    }
    return write_checkpoint(tmp_path / "cousin", config, tensors)


def fresh_store(model: Target, rows: int = 4, tokens: int = 2048) -> KVStore:
    config = EngineConfig(max_batch_rows=rows)
    return KVCache([model.kv_shape], config, tokens, model.dtype, model.device).stores[0]


def kept(store: KVStore, slot: int, tokens: int) -> list[torch.Tensor]:
    """All layers' keys and values of a row."""
    return [
        side[0]
        for layer in range(store.shape.layers)
        for side in store.read(layer, slot, slot + 1, tokens)
    ]


class Checked(DraftModelDrafter):
    """Holds the cache to what `synced_upto` says of it, after every pass."""

    def __init__(self, folder: Path, target: Target) -> None:
        super().__init__(folder, target)
        self.reference = load_target(folder, target.dtype)
        self.held: dict[int, int] = {}
        self.most = 0

    def attach(self, store: KVStore) -> None:
        super().attach(store)
        self.store = store

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is None
        super().observe(rows, features)
        for row in rows:
            upto = self.held[row.row_id] = self.synced_upto(row.row_id)
            assert upto <= row.computed
            self.most = max(self.most, upto)
            self.check(row.slot, row.tokens[:upto])

    def reset(self, row_id: int) -> None:
        super().reset(row_id)
        assert self.synced_upto(row_id) == 0
        self.held.pop(row_id, None)

    def check(self, slot: int, tokens: Sequence[int]) -> None:
        """The keys and values are those of a pass over these tokens alone."""
        if not tokens:
            return
        alone = fresh_store(self.reference, 1, len(tokens))
        nothing = torch.empty(0, dtype=torch.long)
        span = RowSpan(0, 0, len(tokens))
        self.reference.forward(torch.tensor(tokens), [span], alone, nothing)
        for found, wanted in zip(
            kept(self.store, slot, len(tokens)), kept(alone, 0, len(tokens)), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class Passes:
    """How many tokens each row had in the passes of the drafter's model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[list[int]] = []
        load = draft_model.load_target

        def watched(*args: Any) -> Target:
            model = load(*args)
            forward = model.forward

            def recorded(tokens: torch.Tensor, spans: Sequence[RowSpan], *more: Any) -> Any:
                assert len(tokens) == sum(span.count for span in spans)
                self.counts.append([span.count for span in spans])
                return forward(tokens, spans, *more)

            model.forward = recorded  # type: ignore[method-assign]
            return model

        monkeypatch.setattr(draft_model, "load_target", watched)


# Losslessness


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_changes_no_token(tiny: Target, cousin: Path, setting: str) -> None:
    check_lossless(tiny, "draft-model", cousin, BLOCK_BYTES * 3 // 2, SETTINGS[setting])


@pytest.mark.parametrize("chance", CHANCES)
def test_sampled_sequences_have_the_targets_distribution(
    tmp_path: Path, chance: dict[str, Any]
) -> None:
    config = TINY | {"vocab_size": 6}
    target = load_target(write_checkpoint(tmp_path / "model", config), torch.float32)
    other = write_checkpoint(tmp_path / "other", config, tiny_tensors(config, seed=1))
    check_distribution(target, "draft-model", other, chance)


# A draft model that is the target


@pytest.mark.parametrize(
    "params",
    [
        greedy(40),
        sampled(40, temperature=1.3, seed=3),
        sampled(40, temperature=1.3, verification=Verification.REJECTION),
    ],
)
def test_what_the_target_itself_would_say_is_accepted(
    tiny: Target, twin: Path, params: SamplingParams
) -> None:
    with running(
        tiny, drafter="draft-model", drafter_dir=str(twin), draft_len=4, max_batch_rows=4
    ) as engine:
        streams = [engine.submit(name, ids, params) for name, ids in PROMPTS.items()]
        for stream in streams:
            stream.wait()
            assert stream.accepted == stream.drafted
            # The first token comes with the prompt, the others five a step.
            assert [len(output.token_ids) for output in stream.outputs] == [1] + [5] * 7 + [4]
            sources = {o.verify_step.source for o in stream.outputs if o.verify_step}
            assert sources == {DraftSource.DRAFT_MODEL}


def test_a_steady_row_costs_one_pass_a_draft(
    tiny: Target, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its drafts are accepted, so it lacks the last of them and the target's own token."""
    passes = Passes(monkeypatch)
    with running(tiny, drafter="draft-model", drafter_dir=str(twin), draft_len=4) as engine:
        engine.one(PROMPTS["1"], greedy(21))
    prompt = len(PROMPTS["1"])
    assert passes.counts == [[prompt + 1], *[[1]] * 3, *[[2], *[[1]] * 3] * 3]


# What the cache holds


@pytest.mark.parametrize("setting", ["greedy with penalties", "seeded"])
def test_the_cache_holds_what_it_is_said_to(
    tiny: Target, cousin: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Checked(cousin, tiny)
    use_drafter(monkeypatch, drafter)
    check_lossless(tiny, "draft-model", cousin, BLOCK_BYTES * 3 // 2, SETTINGS[setting])
    assert not drafter.held
    assert drafter.most > 60


@torch.inference_mode()
def test_a_move_after_drafting_leaves_the_drafts_behind(tiny: Target, twin: Path) -> None:
    """The scheduler moves a row between drafting and verification, with what the target has."""
    drafter = Checked(twin, tiny)
    store = fresh_store(tiny)
    drafter.attach(store)
    tokens = list(PROMPTS["2"])
    [draft] = drafter.propose([query(tokens, 4, slot=2)])
    assert len(draft.token_ids) == 4
    computed = len(tokens) - 1
    store.copy(2, 0, computed)
    store.write(0, torch.arange(store.index_of(2, 0), store.index_of(2, 40)), torch.ones(40, 64))
    settled = tokens + list(draft.token_ids[:3]) + [0]
    drafter.observe([Settled(0, 0, settled, computed, computed + 4, range(4), draft)], None)
    assert drafter.synced_upto(0) == computed
    [moved] = drafter.propose([query(settled, 4, slot=0)])
    other = DraftModelDrafter(twin, tiny)
    other.attach(fresh_store(tiny))
    assert other.propose([query(settled, 4, slot=0)])[0].token_ids == moved.token_ids


@torch.inference_mode()
def test_of_a_draft_what_stands_is_kept(tiny: Target, twin: Path) -> None:
    drafter = Checked(twin, tiny)
    drafter.attach(fresh_store(tiny))
    tokens = list(PROMPTS["2"])
    size = len(tokens)
    for accepted, synced in ((0, size), (1, size + 1), (3, size + 3), (4, size + 3)):
        drafter.reset(0)
        [draft] = drafter.propose([query(tokens, 4)])
        assert drafter.synced_upto(0) == size - 1
        own = (draft.token_ids[accepted] + 1) % 96 if accepted < 4 else 5
        settled = [*tokens, *draft.token_ids[:accepted], own]
        drafter.observe(
            [Settled(0, 0, settled, size - 1, size + accepted, range(accepted + 1), draft)], None
        )
        assert drafter.synced_upto(0) == synced
    drafter.reset(0)
    [draft] = drafter.propose([query(tokens, 4)])
    settled = [*tokens, draft.token_ids[0]]
    drafter.observe([Settled(0, 0, settled, size - 1, size, [0], Draft())], None)
    # The draft was given up. The target said the same, but has not computed it: a row that moves
    # now would lose it.
    assert drafter.synced_upto(0) == size
    assert drafter.propose([query(settled, 1)])[0].token_ids == draft.token_ids[1:2]


# Catching up


@pytest.mark.parametrize("gap", [1, 7, 64, 500])
@torch.inference_mode()
def test_a_gap_is_caught_up_in_one_pass(
    tiny: Target, twin: Path, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    """Steps without drafts cost nothing; after them both rows draft as if there were no gap."""
    passes = Passes(monkeypatch)
    drafter = Checked(twin, tiny)
    drafter.attach(fresh_store(tiny))
    random = torch.Generator().manual_seed(gap)
    rows = [torch.randint(0, 96, (30 + gap,), generator=random).tolist() for _ in range(2)]
    drafter.propose(
        [query(row[:20], 3, row_id=index, slot=index) for index, row in enumerate(rows)]
    )
    monkeypatch.setattr(draft_model, "_CATCH_UP_TOKENS", 2 * gap + 40)
    passes.counts.clear()
    for upto in range(21, 30 + gap + 1):
        drafter.observe(
            [
                Settled(index, index, row[:upto], upto - 2, upto - 1, [index], Draft())
                for index, row in enumerate(rows)
            ],
            None,
        )
        assert drafter.synced_upto(0) in (20, 21)  # the first pass may have said the right token
    assert passes.counts == []
    again = [query(row, 4, row_id=index, slot=index) for index, row in enumerate(rows)]
    drafts = drafter.propose(again)
    assert [len(counts) for counts in passes.counts] == [2] * 4
    assert min(passes.counts[0]) >= gap + 9
    assert passes.counts[1:] == [[1, 1]] * 3
    for draft, row in zip(drafts, rows, strict=True):
        tokens = list(row)
        for token in draft.token_ids:
            assert token == int(tiny.score(tokens)[-1].argmax())
            tokens.append(token)
        assert len(draft.token_ids) == 4


def test_a_long_prompt_is_taken_in_over_several_steps(
    tiny: Target, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row drafts nothing until then, the others go on; after it everything is accepted."""
    budget = 24
    monkeypatch.setattr(draft_model, "_CATCH_UP_TOKENS", budget)
    passes = Passes(monkeypatch)
    long = tuple((7 * i * i + 3 * i) % 96 for i in range(200))
    with running(
        tiny,
        drafter="draft-model",
        drafter_dir=str(twin),
        draft_len=4,
        max_batch_rows=4,
        prefill_chunk_tokens=1000,
        started=False,
    ) as engine:
        streams = {
            name: engine.submit(name, ids, greedy(40))
            for name, ids in {"long": long, "0": PROMPTS["0"], "1": PROMPTS["1"]}.items()
        }
        engine.engine.start()
        for stream in streams.values():
            stream.wait()
    assert max(sum(counts) - 2 * len(counts) for counts in passes.counts) == budget
    for stream in streams.values():
        assert 0 < stream.accepted == stream.drafted
    lens = [len(output.token_ids) for output in streams["long"].outputs]
    silent = lens.index(5) - 1
    assert 5 <= silent <= 200 // budget  # 2 tokens more a step than the budget has
    assert lens == [1] * (1 + silent) + [5] * ((39 - silent) // 5) + [(39 - silent) % 5] * (
        (39 - silent) % 5 > 0
    )
    reasons = [output.gate_reason for output in streams["long"].outputs]
    assert reasons[1 : 1 + silent] == [GateReason.NO_DRAFT] * silent
    assert [len(output.token_ids) for output in streams["0"].outputs][:3] == [1, 5, 5]


@torch.inference_mode()
def test_rows_that_lack_little_come_first(
    tiny: Target, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "_CATCH_UP_TOKENS", 30)
    drafter = Checked(twin, tiny)
    drafter.attach(fresh_store(tiny))
    rows = {0: list(range(90)), 1: list(range(40, 60)), 2: list(range(50, 64))}

    def proposed() -> dict[int, int]:
        queries = [query(row, 2, row_id=index, slot=index) for index, row in rows.items()]
        drafts = drafter.propose(queries)
        return {q.row_id: len(d.token_ids) for q, d in zip(queries, drafts, strict=True)}

    assert proposed() == {0: 0, 1: 2, 2: 2}
    assert {row: drafter.synced_upto(row) for row in rows} == {0: 2, 1: 19, 2: 13}
    assert [proposed()[0] for _ in range(3)] == [0, 0, 2]
    assert drafter.synced_upto(0) == 89


# Contexts longer than the draft model's


@pytest.mark.parametrize("longest", [16, 41, 50])
def test_it_falls_silent_beyond_its_own_context(tiny: Target, tmp_path: Path, longest: int) -> None:
    short = write_checkpoint(tmp_path / "short", TINY | {"max_position_embeddings": longest})
    with running(tiny, drafter="none") as engine:
        expected = engine.run(PROMPTS, greedy(60))
    with running(tiny, drafter="draft-model", drafter_dir=str(short), draft_len=4) as engine:
        streams = {name: engine.submit(name, ids, greedy(60)) for name, ids in PROMPTS.items()}
        for name, stream in streams.items():
            assert stream.wait().tokens == expected[name]
            at = len(PROMPTS[name])
            for output in stream.outputs:
                drafted = len(output.verify_step.draft_ids) if output.verify_step else 0
                if at > len(PROMPTS[name]):
                    left = 60 - (at - len(PROMPTS[name])) - 1
                    assert drafted == max(min(4, left, longest - at + 1), 0)
                at += len(output.token_ids)
            assert stream.accepted == stream.drafted
        assert streams["0"].drafted > 0


# Refused


def test_another_vocabulary_is_refused(tiny: Target, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "other", TINY | {"vocab_size": 97})
    wanted = f"{folder}: the drafter's vocab_size is 97, the target's is 96"
    assert refusal("draft-model", folder, tiny) == wanted


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", TINY)
    folder = write_checkpoint(tmp_path / "other", TINY)
    (target / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    loaded = load_target(target, torch.float32)
    DraftModelDrafter(folder, loaded)  # it tells of none
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    DraftModelDrafter(folder, loaded)
    swapped = {"model": {"vocab": {"a": 1, "b": 0}, "merges": ["a b"]}}
    (folder / "tokenizer.json").write_text(json.dumps(swapped))
    message = refusal("draft-model", folder, loaded)
    assert message.startswith(f"{folder}: the drafter was made for the tokenizer ")
    one, other = message.split("the tokenizer ")[1].split(", the target's is ")
    assert one != other
    assert len(one) == len(other) == 12


def test_what_is_no_checkpoint_is_refused(tiny: Target, tmp_path: Path, twin: Path) -> None:
    assert "config.json" in refusal("draft-model", tmp_path / "nowhere", tiny)
    (twin / "model.safetensors").unlink()
    assert "holds no .safetensors file" in refusal("draft-model", twin, tiny)


def test_a_folder_is_needed(tiny: Target) -> None:
    with pytest.raises(DraftgateError, match=r"drafter_dir.*'draft-model' needs"):
        Engine(tiny, EngineConfig(drafter="draft-model"))


def test_it_takes_queries_of_no_row(tiny: Target, twin: Path) -> None:
    none: list[DraftQuery] = []
    assert DraftModelDrafter(twin, tiny).propose(none) == []
