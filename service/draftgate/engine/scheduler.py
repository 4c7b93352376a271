"""Which rows run in the next step, with how many tokens. Knows queues and blocks, no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from draftgate.engine.config import EngineConfig
from draftgate.engine.kv_cache import KVCache
from draftgate.engine.sequence import Sequence
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["ScheduledRow", "Scheduler"]

_CONTEXT_TOKENS = 700
"""The context at which attention costs a prompt's token as much as everything else does (measured
on a CPU: 0.5 us a token and position against 0.35 ms a token)."""

_SMALLEST_CHUNK = 16
"""Below it a pass costs what reading the weights costs, and a smaller chunk saves nothing."""


@dataclass(frozen=True)
class ScheduledRow:
    """A row's part in the step."""

    sequence: Sequence
    count: int
    """How many of its own tokens are computed: one when it decodes, a chunk of its prompt else."""
    draft_len: int
    """How many drafted tokens it adds: all that were drafted for it, or none."""


class Scheduler:
    """In-flight batching: rows join and leave between any two steps.

    Running rows fill slots 0 to n - 1 of the cache, so that attention reads one contiguous range.
    """

    def __init__(self, config: EngineConfig, cache: KVCache) -> None:
        self._config = config
        self._cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by slot
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises DraftgateError(RESOURCE_EXHAUSTED) when the queue is full."""
        free_rows = self._cache.max_rows - len(self.running)
        if len(self.waiting) >= self._config.max_waiting + free_rows:
            raise DraftgateError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"the engine's queue is full: {len(self.waiting)} requests wait for one of "
                f"{self._cache.max_rows} rows; try again later",
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it held."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def trim(self) -> None:
        """Free what rows hold beyond their own tokens: a draft, rejected or only being made, may
        have taken a block more than its row needs."""
        for sequence in self.running:
            assert sequence.slot is not None
            self._cache.shrink(sequence.slot, max(sequence.computed, sequence.prefill_upto))

    def schedule(
        self, now_s: float, draft_lens: dict[int, int], most_new: int | None = None
    ) -> list[ScheduledRow]:
        """The rows of the next step, in slot order.

        draft_lens: by row id, how many tokens were drafted for it. most_new: how many that wait may
        begin; None: as many as there is room for. A row that finds no free block
        makes the youngest rows go back into the queue, to be computed again later, until it fits;
        drafts get what blocks are left after that, or are given up.
        """
        self.trim()
        self._admit(now_s, len(self.waiting) if most_new is None else most_new)
        counts: dict[int, int] = {}
        chunk_left = self._config.prefill_chunk_tokens
        for sequence in sorted(self.running, key=lambda s: s.row_id):
            if sequence.slot is None:
                continue  # preempted a moment ago, for an older row
            count = 1
            if not sequence.decoding:
                count = min(self._chunk(sequence), chunk_left)
                chunk_left -= count
            if count and self._make_room(sequence, sequence.computed + count):
                counts[sequence.row_id] = count
        return [
            self._scheduled(sequence, counts[sequence.row_id], draft_lens.get(sequence.row_id, 0))
            for sequence in self.running
            if sequence.row_id in counts
        ]

    def planned_prefill(self) -> int:
        """How many tokens of prompts the next step is going to compute, new rows' among them."""
        left = sum(s.prefill_upto - s.computed for s in self.running if not s.decoding)
        free = self._cache.max_rows - len(self.running)
        left += sum(len(s.tokens) for s in islice(self.waiting, free))
        return min(left, self._config.prefill_chunk_tokens)

    def _chunk(self, sequence: Sequence) -> int:
        """How many tokens of its prompt a row may compute in one step.

        Attention makes a token dearer the longer its context, so where other rows wait for the
        step to decode, the chunk gets smaller as its prompt goes on.
        """
        left = sequence.prefill_upto - sequence.computed
        if not any(other.decoding for other in self.running):
            return left
        dearer = 1 + sequence.computed / _CONTEXT_TOKENS
        return min(left, max(int(self._config.prefill_chunk_tokens / dearer), _SMALLEST_CHUNK))

    def _admit(self, now_s: float, most: int) -> None:
        full = min(len(self.running) + most, self._cache.max_rows)
        while self.waiting and len(self.running) < full:
            sequence = self.waiting[0]
            slot = len(self.running)
            # All of its prompt must fit now, or two long prompts could starve each other half-way.
            if not self._cache.grow(slot, len(sequence.tokens)):
                return
            self.waiting.popleft()
            sequence.slot = slot
            sequence.computed = 0
            sequence.prefill_upto = len(sequence.tokens)
            if sequence.started_s is None:
                sequence.started_s = now_s
            self.running.append(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Get blocks for the row's first `tokens` positions; False if it was put back itself."""
        assert sequence.slot is not None
        while not self._cache.grow(sequence.slot, tokens):
            youngest = max(self.running, key=lambda s: s.row_id)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _scheduled(self, sequence: Sequence, count: int, draft_len: int) -> ScheduledRow:
        assert sequence.slot is not None
        fits = self._cache.grow(sequence.slot, sequence.computed + count + draft_len)
        return ScheduledRow(sequence, count, draft_len if fits else 0)

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        """Free a row's slot and close the gap with the last row."""
        slot = sequence.slot
        assert slot is not None
        self._cache.release(slot)
        last = self.running.pop()
        if last is not sequence:
            assert last.slot is not None
            self._cache.move(last.slot, slot, last.computed)
            last.slot = slot
            self.running[slot] = last
        sequence.slot = None
        sequence.computed = 0
