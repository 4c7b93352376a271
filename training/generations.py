"""What the target answers, in its own words: the text that the drafter learns to foresee.

The target's hidden states are written down while it answers, so they cost no pass of their own.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from draftgate.contract import FinishReason
from draftgate.engine import Engine, EngineConfig, Output, Request
from draftgate.engine.drafters import Draft, Drafter, DraftQuery, Settled
from draftgate.sampling import SamplingParams
from draftgate.text import Message, Tokenizer
from training.features import write_features
from training.prompts import Prompt

__all__ = ["Generation", "generate", "read_part"]

_ROWS = 64
_SHARD = 256
"""Generations in one file."""


@dataclass(frozen=True)
class Generation:
    """A prompt and what the target made of it."""

    prompt_key: str
    """Which prompt; see `Prompt.key`."""
    task: str
    tokens: npt.NDArray[np.uint16]
    """[tokens] uint16: the prompt in the model's chat template, then the answer."""
    prompt_len: int
    """How many of the tokens are the prompt."""
    greedy: bool
    """Temperature 0, else 0.8."""


def generate(
    model_dir: Path,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_tokens: int,
    stop_after_tokens: int | None,
    seed: int,
    taps: tuple[int, ...],
    worker: int = 0,
    workers: int = 1,
) -> None:
    """Answer the prompts, three in five greedily, into files of 256 answers in `out`.

    What is there is kept and not made again, by the prompts' keys: their order and number may
    change. Ends after `stop_after_tokens` tokens of answers; None: with the last prompt.
    taps: the layers whose inputs are recorded, one `.features.npy` beside each file.
    worker, workers: this process takes every `workers`-th prompt from the `worker`-th on. Only the
    first shows its progress, over its own share.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = sorted(out.glob("part-*.npz"))
    done = {g.prompt_key: len(g.tokens) - g.prompt_len for part in parts for g in read_part(part)}
    mine = prompts[worker::workers]
    made = sum(done.get(prompt.key, 0) for prompt in mine)
    todo = iter([prompt for prompt in mine if prompt.key not in done])
    tokenizer = Tokenizer.load(model_dir)
    recorder = _Recorder(taps)
    engine = Engine.load(
        model_dir,
        EngineConfig(
            dtype="bfloat16",  # that of the features which are kept
            max_batch_rows=_ROWS,
            kv_cache_bytes=3 << 30,
            max_waiting=_ROWS,
            gate="fixed",  # Nothing is drafted, and nobody asks what that costs.
            threads=max(len(os.sched_getaffinity(0)) // workers, 1),
        ),
        drafter=recorder,
    )
    ended: queue.SimpleQueue[tuple[Generation, torch.Tensor]] = queue.SimpleQueue()
    running = _Running(engine, tokenizer, max_tokens, seed, recorder, ended)
    engine.start()
    shard: list[tuple[Generation, torch.Tensor]] = []
    most = len(mine) * max_tokens
    wanted = most if stop_after_tokens is None else min(stop_after_tokens, most)
    with Progress(disable=worker > 0) as progress:
        bar = progress.add_task(f"{out.name} answers (tokens)", total=wanted, completed=made)
        in_flight = 0
        while made < wanted:
            while in_flight < 2 * _ROWS and (prompt := next(todo, None)) is not None:
                running.submit(prompt)
                in_flight += 1
            if not in_flight:
                break
            generation, features = ended.get()
            in_flight -= 1
            shard.append((generation, features))
            made += len(generation.tokens) - generation.prompt_len
            progress.update(bar, completed=made)
            if len(shard) == _SHARD:
                _write(out, shard, worker)
                shard = []
        progress.update(bar, total=made)  # Answers may end before their longest.
    if shard:
        _write(out, shard, worker)
    engine.close()  # What it still works on is lost, and made when this is run again.


class _Running:
    """Generations in an engine; each goes to the queue when it ends."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        max_tokens: int,
        seed: int,
        recorder: _Recorder,
        ended: queue.SimpleQueue[tuple[Generation, torch.Tensor]],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._seed = seed
        self._recorder = recorder
        self._ended = ended
        self._submitted = 0

    def submit(self, prompt: Prompt) -> None:
        chance = int(prompt.key, 16)  # the prompt's own, whichever prompts there are beside it
        greedy = chance % 5 < 3
        ids = self._tokenizer.encode_chat([Message("user", prompt.text)])
        tokens = list(ids)
        row_id = self._submitted  # the engine numbers its rows in the order they come
        self._submitted += 1

        def take(output: Output) -> None:
            tokens.extend(output.token_ids)
            if output.finish_reason not in (FinishReason.NONE, FinishReason.CANCELLED):
                if output.error is not None:
                    raise output.error
                made = np.array(tokens, dtype=np.uint16)
                generation = Generation(prompt.key, prompt.task, made, len(ids), greedy)
                self._ended.put((generation, self._recorder.take(row_id)))

        params = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=0.0 if greedy else 0.8,
            seed=None if greedy else (self._seed + chance) % (1 << 64),
        )
        self._engine.submit(Request(prompt.key, tuple(ids), params), take)


class _Recorder(Drafter):
    """Drafts nothing and keeps what a drafter would learn from."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._ended: dict[int, torch.Tensor] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return [Draft() for _ in queries]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is not None
        for row in rows:
            found = features[torch.tensor(row.packed)]
            self._rows.setdefault(row.row_id, []).append(found)

    def reset(self, row_id: int) -> None:
        if row_id in self._rows:
            self._ended[row_id] = torch.cat(self._rows.pop(row_id))

    def synced_upto(self, row_id: int) -> int:
        return 0

    def take(self, row_id: int) -> torch.Tensor:
        """[tokens - 1, taps * hidden] of a row that has ended: the last token has no pass."""
        return self._ended.pop(row_id)


def _write(folder: Path, shard: Sequence[tuple[Generation, torch.Tensor]], worker: int) -> None:
    """One more file, complete or not there, with its features."""
    generations = [generation for generation, _ in shard]
    path = folder / f"part-{generations[0].prompt_key}.npz"
    half = folder / f"half-{worker}.npz"
    np.savez_compressed(
        half,
        prompt_key=np.array([g.prompt_key for g in generations]),
        task=np.array([g.task for g in generations]),
        tokens=np.concatenate([g.tokens for g in generations]),
        length=np.array([len(g.tokens) for g in generations], dtype=np.int32),
        prompt_len=np.array([g.prompt_len for g in generations], dtype=np.int32),
        greedy=np.array([g.greedy for g in generations]),
    )
    write_features(path, torch.cat([features for _, features in shard]))
    half.rename(path)


def read_part(path: Path) -> Iterator[Generation]:
    """The generations of one file, in its order."""
    with np.load(path) as held:
        columns = {name: held[name] for name in held.files}
    ends = np.cumsum(columns["length"])
    for row, end in enumerate(ends):
        yield Generation(
            prompt_key=str(columns["prompt_key"][row]),
            task=str(columns["task"][row]),
            tokens=columns["tokens"][end - columns["length"][row] : end],
            prompt_len=int(columns["prompt_len"][row]),
            greedy=bool(columns["greedy"][row]),
        )
