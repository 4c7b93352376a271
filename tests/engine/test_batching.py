"""A request's tokens do not depend on who shares its steps, in fp32."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgate.contract import FinishReason
from draftgate.engine import EngineConfig, Output, Target
from draftgate.engine.drafters import make_drafter
from draftgate.sampling import SamplingParams
from tests.support.eagle import write_drafter
from tests.support.engine import Running, Stream, greedy, running, sampled, use_drafter
from tests.support.speculation import PacedDrafter, paces
from tests.support.tiny_models import BLOCK_BYTES, TINY


class Crowd:
    """Submits prompts at random steps, and other requests that it ends at random."""

    def __init__(
        self,
        engine: Running,
        prompts: Mapping[str, Sequence[int]],
        params: SamplingParams,
        seed: int,
        *,
        join_share: float,
    ) -> None:
        self.engine = engine
        self.params = params
        self.prompts = prompts
        self.random = np.random.default_rng(seed)
        self.join_share = join_share
        self.to_come = list(prompts)
        self.random.shuffle(self.to_come)
        self.streams: dict[str, Stream] = {}
        self.extras: dict[str, Stream] = {}
        self.extras_to_come = len(prompts) // 2
        self.complete = threading.Event()

    def run(self) -> dict[str, list[int]]:
        self._join()
        assert self.complete.wait(600)
        tokens = {name: stream.wait().tokens for name, stream in self.streams.items()}
        for stream in self.extras.values():
            self.engine.engine.stop(stream.request.request_id)
            stream.wait()
        return tokens

    def _join(self) -> None:
        if self.to_come:
            name = self.to_come.pop()
            ids, hook = self.prompts[name], self._on_output
            self.streams[name] = self.engine.submit(name, ids, self.params, on_output=hook)
        elif all(stream.ended for stream in self.streams.values()):
            self.complete.set()

    def _on_output(self, stream: Stream, output: Output) -> None:
        """Between two steps, on the engine's thread."""
        if output.finish_reason is not FinishReason.NONE:
            self._join()
        if self.random.random() < self.join_share:
            self._join()
        if self.extras_to_come and self.random.random() < self.join_share:
            self.extras_to_come -= 1
            name = f"extra {self.extras_to_come}"
            ids = self.prompts[str(self.random.choice(list(self.prompts)))]
            self.extras[name] = self.engine.submit(name, ids, greedy(100))
        if self.extras and self.random.random() < self.join_share:
            self.engine.engine.stop(str(self.random.choice(list(self.extras))))


def first_chosen(prompts: dict[str, list[int]]) -> list[str]:
    """An eighth of the prompts, of every kind."""
    return sorted(prompts)[::8]


def check_one_by_one(
    target: Target,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    names: Sequence[str],
) -> None:
    with running(target, max_batch_rows=1, drafter="none") as engine:
        for name in names:
            assert engine.one(prompts[name], greedy(32)).tokens == together[name][:32]


def test_one_by_one_is_as_together(
    target: Target, prompts: dict[str, list[int]], together: dict[str, list[int]]
) -> None:
    check_one_by_one(target, prompts, together, first_chosen(prompts))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_others_one_by_one_too(
    target: Target, prompts: dict[str, list[int]], together: dict[str, list[int]]
) -> None:
    names = sorted(set(prompts) - set(first_chosen(prompts)))
    check_one_by_one(target, prompts, together, names)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("drafter", "every"),
    [
        ("ngram", 2),
        pytest.param("ngram", 1, marks=pytest.mark.slow),
        pytest.param("hybrid", 1, marks=pytest.mark.slow),
    ],
)
def test_joins_cancels_and_chunks_change_no_token(
    target: Target,
    any_drafter: Path,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    drafter: str,
    every: int,
) -> None:
    """Joining and leaving among requests that are cancelled, with odd chunks, fewer rows than
    requests and speculation on."""
    chosen = {name: prompts[name] for name in sorted(prompts)[::every]}
    settings = {"drafter": drafter, "drafter_dir": str(any_drafter), "draft_len": 2}
    with running(target, prefill_chunk_tokens=53, max_batch_rows=11, **settings) as engine:
        tokens = Crowd(engine, chosen, greedy(32), seed=1, join_share=0.15).run()
        counters = engine.engine.counters()
    assert tokens == {name: together[name][:32] for name in chosen}
    assert counters.rows_freed_cancelled > 0
    assert counters.accepted_tokens > 0


def test_rows_put_back_for_want_of_blocks_lose_nothing(
    target: Target, prompts: dict[str, list[int]], together: dict[str, list[int]]
) -> None:
    names = ["quote-refrain", "list-alphabet", "digits-count", "code-class", "cjk-mixed"]
    block_bytes = 16 * 2 * 3 * 64 * 4 * 30
    with running(target, kv_cache_bytes=19 * block_bytes, max_batch_rows=5) as engine:
        tokens = engine.run({name: prompts[name] for name in names}, greedy(64))
        assert engine.engine.counters().preemptions > 0
    assert tokens == {name: together[name] for name in names}


# The same on a tiny model, many times over

TINY_PROMPTS = {
    f"{n}": tuple((5 * i * i + n * i + 3 * n) % 96 for i in range(1 + (n * 37) % 90))
    for n in range(16)
}
TINY_SETTINGS = {
    "greedy": greedy(30, repetition_penalty=1.2),
    "seeded": sampled(30, seed=3, temperature=1.2, top_p=0.95),
}


@pytest.fixture(scope="module")
def tiny_alone(tiny: Target) -> dict[str, dict[str, list[int]]]:
    with running(tiny, max_batch_rows=1, drafter="none") as engine:
        return {
            setting: {name: engine.one(ids, params).tokens for name, ids in TINY_PROMPTS.items()}
            for setting, params in TINY_SETTINGS.items()
        }


@pytest.fixture(scope="module")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle") / "drafter"
    return write_drafter(folder, TINY, draft_vocab=40)


@pytest.mark.parametrize("setting", TINY_SETTINGS)
@pytest.mark.parametrize("seed", range(12))
def test_any_crowd(
    tiny: Target,
    tiny_drafter: Path,
    tiny_alone: dict[str, dict[str, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    seed: int,
) -> None:
    """Each third of the seeds has another drafter; it drafts any number at each step."""
    random = np.random.default_rng(100 + seed)
    name = ("ngram", "eagle", "hybrid")[seed % 3]
    block_bytes = BLOCK_BYTES if name == "ngram" else BLOCK_BYTES * 3 // 2  # one layer more
    settings: dict[str, Any] = {
        "drafter": name,
        "drafter_dir": str(tiny_drafter),
        "draft_len": int(random.integers(0, 9)),
        "ngram_min": 1,
        "max_batch_rows": int(random.integers(1, 9)),
        "prefill_chunk_tokens": int(random.choice([1, 3, 16, 50, 128])),
        # As little as a long row and a half, or plenty.
        "kv_cache_bytes": int(random.choice([10, 15, 1000])) * block_bytes,
    }
    drafter = make_drafter(EngineConfig.from_mapping(settings), tiny)
    if drafter is not None:
        use_drafter(monkeypatch, PacedDrafter(drafter, paces(seed, settings["draft_len"])))
    with running(tiny, **settings) as engine:
        crowd = Crowd(engine, TINY_PROMPTS, TINY_SETTINGS[setting], seed, join_share=0.3)
        assert crowd.run() == tiny_alone[setting]


def test_long_and_short_rows_mixed(tiny: Target) -> None:
    """Rows of 2,000 positions among rows of ten: attention runs in several calls, over slots of
    which some lie between those of another call."""
    prompts = {
        f"{n}": tuple((7 * i * i + n * i) % 96 for i in range(2000 if n in (1, 4, 5) else 3 + n))
        for n in range(8)
    }
    params = greedy(25, repetition_penalty=1.1)
    with running(tiny, max_batch_rows=1, drafter="none") as engine:
        expected = {name: engine.one(ids, params).tokens for name, ids in prompts.items()}
    for draft_len in (0, 4):
        with running(tiny, draft_len=draft_len, ngram_min=1, prefill_chunk_tokens=300) as engine:
            assert engine.run(prompts, params) == expected
