"""Memory of the embedded engine: weights, KV cache at its budget, many short requests."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import MemoryUse, memory_use
from draftgate.checkpoint.architectures import ModelShape
from draftgate.engine import Engine, EngineConfig, Output, Request, Target, load_target
from draftgate.engine.kv_cache import BLOCK_TOKENS
from draftgate.sampling import SamplingParams

__all__ = [
    "KVMemory",
    "ShortRequests",
    "WeightMemory",
    "load_measured",
    "measure_kv_cache",
    "measure_short_requests",
    "weight_bytes",
]

_POLL_S = 0.02


@dataclass(frozen=True)
class WeightMemory:
    """Resident memory around loading the checkpoint."""

    before: MemoryUse
    after: MemoryUse
    weight_bytes: int
    """What one step reads: every weight once in the compute dtype."""

    @property
    def copies(self) -> float:
        """How many times over the weights are resident, everything that came with them included."""
        return (self.after.total_bytes - self.before.total_bytes) / self.weight_bytes


@dataclass(frozen=True)
class KVMemory:
    """Resident memory while requests fill the KV cache."""

    budget_bytes: int
    before: MemoryUse
    """Idle, after the same requests came and went once."""
    highest: MemoryUse
    used_blocks: int
    """Most that were in use."""
    total_blocks: int
    after: MemoryUse
    """All requests gone."""

    @property
    def share(self) -> float:
        """Growth of the process's own memory as a share of the budget.

        The prompts also look up pages of the embedding's file, which is not the cache's doing.
        """
        grown_bytes = self.highest.anonymous_bytes - self.before.anonymous_bytes
        return grown_bytes / self.budget_bytes


@dataclass(frozen=True)
class ShortRequests:
    """Resident memory over many short requests, read as each ends."""

    requests: int
    first_quarter_bytes: int
    """Median over the first quarter of them."""
    last_quarter_bytes: int
    bytes_per_request: float
    """Slope of a straight line through all."""

    @property
    def growth(self) -> float:
        """From the first to the last quarter, as a share of the first."""
        return self.last_quarter_bytes / self.first_quarter_bytes - 1


def load_measured(model_dir: Path, dtype: torch.dtype) -> tuple[Target, WeightMemory]:
    """Load a checkpoint on the CPU. Nothing of it may have been loaded before."""
    before = memory_use()
    target = load_target(model_dir, dtype)
    after = memory_use()
    return target, WeightMemory(before, after, weight_bytes(target.config.shape, dtype))


def weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Every matrix that a step multiplies by, the output head included.

    The embedding is not: a step looks up one row for each token, and on a CPU it stays a mapped
    file. Norms and biases are too small to count.
    """
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden_size
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size
    return (shape.layers * (heads + feed_forward) + head) * dtype.itemsize


def measure_kv_cache(target: Target, rows: int, budget_bytes: int) -> KVMemory:
    """Fill the cache with requests until one has to give way to another.

    It is done twice and the second time counts: by then everything else that passes of such sizes
    need, such as oneDNN's kernels and buffers of activations, is resident.
    """
    # Without drafts a row grows by one position a step, which `_fill` counts on.
    engine = _engine(
        target, EngineConfig(draft_len=0, max_batch_rows=rows, kv_cache_bytes=budget_bytes)
    )
    try:
        _fill(engine, rows)
        before = memory_use()
        highest, used_blocks = _fill(engine, rows)
        after = memory_use()
    finally:
        engine.close()
    total_blocks = engine.counters().kv_total_blocks
    return KVMemory(budget_bytes, before, highest, used_blocks, total_blocks, after)


def _fill(engine: Engine, rows: int) -> tuple[MemoryUse, int]:
    """The most memory and blocks in use on the way to a full cache, which is empty afterwards."""
    chunk = engine.config.prefill_chunk_tokens
    # Positions of each row when all is full. While the rows after it read their prompts, a row
    # decodes: it starts with that much less.
    share = engine.counters().kv_total_blocks // rows * BLOCK_TOKENS
    steps_of_one = -(-share // chunk)
    crowd = _Crowd(engine)
    preemptions = engine.counters().preemptions
    for index in range(rows):
        head_start = (rows - 1 - index) * steps_of_one + 2 * BLOCK_TOKENS
        prompt = max(share - head_start, 1)
        crowd.submit(prompt, engine.max_sequence_tokens - prompt)
    highest, used_blocks = memory_use(), 0
    while crowd.running and (counters := engine.counters()).preemptions == preemptions:
        used_blocks = max(used_blocks, counters.kv_used_blocks)
        highest = max(highest, memory_use(), key=lambda use: use.anonymous_bytes)
        time.sleep(_POLL_S)
    crowd.stop()
    return highest, used_blocks


def measure_short_requests(target: Target, rows: int, count: int) -> ShortRequests:
    """Run `count` requests of a few tokens each, `rows` at a time.

    A quarter as many run before them and do not count: they meet most of the sizes of pass for
    which oneDNN makes its kernels.
    """
    engine = _engine(target, EngineConfig(max_batch_rows=rows))
    try:
        crowd = _Crowd(engine)
        generator = random.Random(0)
        for index in range(count + count // 4):
            crowd.submit(generator.randint(4, 12), generator.randint(2, 6), index)
            crowd.wait(at_most=2 * rows)
        crowd.wait()
    finally:
        engine.close()
    quarter = max(count // 4, 1)
    totals = np.array(crowd.memory_bytes[-count:])
    return ShortRequests(
        requests=count,
        first_quarter_bytes=int(np.median(totals[:quarter])),
        last_quarter_bytes=int(np.median(totals[-quarter:])),
        bytes_per_request=float(np.polyfit(np.arange(count), totals, 1)[0]) if count > 1 else 0.0,
    )


def _engine(target: Target, config: EngineConfig) -> Engine:
    engine = Engine(target, config)
    engine.start()
    return engine


class _Crowd:
    """Many requests of random tokens, greedy and sampled ones by turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._generator = random.Random(0)
        self._running: set[str] = set()
        self._ended = threading.Condition()
        self._count = 0
        self.memory_bytes: list[int] = []
        """Resident memory as each request ended."""

    def submit(self, prompt_tokens: int, max_tokens: int, kind: int = 0) -> None:
        vocab_size = self._engine.target.config.shape.vocab_size
        ids = tuple(self._generator.randrange(vocab_size) for _ in range(prompt_tokens))
        request = Request(str(self._count), ids, _sampling(max_tokens, kind))
        self._count += 1
        with self._ended:
            self._running.add(request.request_id)
        self._engine.submit(request, self._take)

    @property
    def running(self) -> int:
        with self._ended:
            return len(self._running)

    def wait(self, *, at_most: int = 0) -> None:
        """Until no more than `at_most` are running."""
        with self._ended:
            self._ended.wait_for(lambda: len(self._running) <= at_most)

    def stop(self) -> None:
        """End what is running."""
        with self._ended:
            running = list(self._running)
        for request_id in running:
            self._engine.stop(request_id)
        self.wait()

    def _take(self, output: Output) -> None:
        if not output.finish_reason:
            return
        with self._ended:
            self.memory_bytes.append(memory_use().total_bytes)
            self._running.discard(output.request_id)
            self._ended.notify()


def _sampling(max_tokens: int, kind: int) -> SamplingParams:
    kinds = (
        SamplingParams(max_tokens, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens, temperature=0.0, repetition_penalty=1.1, ignore_eos=True),
        SamplingParams(max_tokens, seed=kind, logprobs=2, ignore_eos=True),
    )
    return kinds[kind % len(kinds)]
