"""The scheduler and the real cache over random traces of requests."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from draftgate.engine import EngineConfig, Request
from draftgate.engine.kv_cache import BLOCK_TOKENS, KVCache
from draftgate.engine.sampler import RowSampler
from draftgate.engine.scheduler import ScheduledRow, Scheduler
from draftgate.engine.sequence import Sequence
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from tests.support.kv_cache import KV_SHAPE, SHAPE, stored, write
from tests.support.tiny_models import BLOCK_BYTES

CPU = torch.device("cpu")
LONGEST = 6 * BLOCK_TOKENS


class Trace:
    """Stands for the stepper: computes scheduled tokens, emits, and lets rows leave."""

    def __init__(
        self,
        blocks: int,
        rows: int,
        chunk: int,
        max_waiting: int = 1000,
        longest: int = LONGEST,
    ) -> None:
        config = EngineConfig(
            kv_cache_bytes=blocks * BLOCK_BYTES,
            max_batch_rows=rows,
            prefill_chunk_tokens=chunk,
            max_waiting=max_waiting,
        )
        self.chunk = chunk
        self.longest = longest
        self.cache = KVCache([KV_SHAPE], config, longest, torch.float32, CPU)
        self.scheduler = Scheduler(config, self.cache)
        self.ids = itertools.count()
        self.live: list[Sequence] = []

    def add(self, prompt: int, output: int) -> Sequence:
        params = SamplingParams(max_tokens=output, temperature=0.0)
        request = Request(str(len(self.live)), (0,) * prompt, params)
        sequence = Sequence(
            row_id=next(self.ids),
            request=request,
            sink=lambda output: None,
            make_sampler=lambda: RowSampler(params, request.input_ids, [], SHAPE.vocab_size, CPU),
            arrived_s=0.0,
            tokens=[0] * prompt,
        )
        self.scheduler.add(sequence)
        self.live.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)
        self.check()

    def step(self, drafts: int = 0, accepted: int = 0) -> list[ScheduledRow]:
        """One step in which every decoding row drafts and keeps up to so many tokens."""
        lens = {}
        for sequence in self.scheduler.running:
            if sequence.decoding:
                room = min(sequence.budget, self.longest - len(sequence.tokens)) - 1
                lens[sequence.row_id] = max(min(drafts, room), 0)
        before = {s.row_id: s.computed for s in self.scheduler.running}
        rows = self.scheduler.schedule(0.0, lens)
        self.check()
        prefilled = sum(row.count for row in rows if not row.sequence.decoding)
        assert prefilled <= self.chunk
        for row in rows:
            assert row.sequence.computed == before.get(row.sequence.row_id, 0)
            assert row.draft_len in (0, lens.get(row.sequence.row_id, 0))
            self._compute(row, accepted)
        self.check()
        return rows

    def check(self) -> None:
        """Rows lie in slots 0 to n - 1, each reads back what it wrote, and blocks add up."""
        running = self.scheduler.running
        assert [s.slot for s in running] == list(range(len(running)))
        assert all(s.slot is None and s.computed == 0 for s in self.scheduler.waiting)
        assert {*running, *self.scheduler.waiting} == set(self.live)
        assert self.cache.used_blocks <= self.cache.total_blocks
        assert self.cache.used_blocks >= sum(-(-s.computed // BLOCK_TOKENS) for s in running)
        for sequence in running:
            assert sequence.slot is not None
            values = stored(self.cache, sequence.slot, sequence.computed)
            assert values == [self._value(sequence, p) for p in range(sequence.computed)]

    def _compute(self, row: ScheduledRow, accepted: int) -> None:
        sequence = row.sequence
        assert sequence.slot is not None
        assert 0 < row.count <= len(sequence.tokens) - sequence.computed
        written = range(sequence.computed, sequence.computed + row.count + row.draft_len)
        assert len(written) + sequence.computed <= self.longest
        held = self.cache.used_blocks
        assert self.cache.grow(sequence.slot, written.stop)
        assert self.cache.used_blocks == held  # the room was made before
        write(self.cache, sequence.slot, written.start, [self._value(sequence, p) for p in written])
        sequence.computed += row.count
        if not sequence.decoding:
            return
        kept = min(accepted, row.draft_len)
        sequence.computed += kept
        sequence.tokens += [0] * (kept + 1)
        sequence.prefill_upto = len(sequence.tokens) - 1
        if sequence.budget <= 0 or len(sequence.tokens) >= self.longest:
            self.remove(sequence)

    @staticmethod
    def _value(sequence: Sequence, position: int) -> float:
        return float(1 + sequence.row_id * 10_000 + position)


REQUESTS = st.tuples(st.integers(1, LONGEST - 1), st.integers(1, 60))


@settings(max_examples=120)
@given(
    blocks=st.integers(6, 14),
    rows=st.integers(1, 5),
    chunk=st.integers(1, 40),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), REQUESTS),
            st.tuples(st.just("step"), st.tuples(st.integers(0, 8), st.integers(0, 8))),
            st.tuples(st.just("leave"), st.tuples(st.integers(0, 99), st.just(0))),
        ),
        max_size=40,
    ),
)
def test_any_trace_ends_with_everything_done_and_given_back(
    blocks: int, rows: int, chunk: int, events: list[tuple[str, tuple[int, int]]]
) -> None:
    trace = Trace(blocks, rows, chunk)
    for kind, (first, second) in events:
        if kind == "add":
            trace.add(first, second)
        elif kind == "step":
            trace.step(first, second)
        elif trace.live:
            trace.remove(trace.live[first % len(trace.live)])
    steps = 0
    while trace.live:
        assert trace.step(4, 2)  # there is always something to do
        steps += 1
        assert steps < 20_000
    assert trace.cache.used_blocks == 0


def test_first_come_first_served() -> None:
    trace = Trace(blocks=40, rows=2, chunk=1000)
    first, second, third = trace.add(10, 5), trace.add(10, 5), trace.add(10, 5)
    assert [row.sequence for row in trace.step()] == [first, second]
    trace.remove(first)
    assert {row.sequence for row in trace.step()} == {second, third}


def test_a_chunk_is_shared_by_prompts_in_order_of_arrival() -> None:
    trace = Trace(blocks=40, rows=4, chunk=32)
    decoding = trace.add(4, 50)
    trace.step()
    long, short = trace.add(60, 1), trace.add(20, 1)
    seen = [[(row.sequence, row.count) for row in trace.step()] for _ in range(3)]
    assert seen == [
        [(decoding, 1), (long, 32)],
        [(decoding, 1), (long, 28), (short, 4)],
        # The row that ended left its slot to the last one.
        [(decoding, 1), (short, 16)],
    ]


def test_the_youngest_row_makes_room_and_comes_back_before_those_who_wait() -> None:
    trace = Trace(blocks=6, rows=3, chunk=1000)
    old, young = trace.add(47, 40), trace.add(40, 40)  # 3 blocks each: full
    trace.step()
    waiting = trace.add(40, 1)
    trace.step()
    assert trace.scheduler.preemptions == 0
    rows = trace.step()  # the older row's 49th token
    assert [row.sequence for row in rows] == [old]
    assert trace.scheduler.preemptions == 1
    assert list(trace.scheduler.waiting) == [young, waiting]
    trace.remove(old)
    # Both fit now; what the preempted row had emitted is computed again.
    assert [(row.sequence, row.count) for row in trace.step()] == [(young, 42), (waiting, 40)]


def test_drafts_never_put_a_row_back() -> None:
    """The last free block goes to the token a row must compute, not to another row's drafts."""
    trace = Trace(blocks=7, rows=2, chunk=1000)
    old, young = trace.add(44, 40), trace.add(48, 40)  # 3 blocks each, one is free
    trace.step()
    # The older row's drafts reach into a new block; the younger one's own token needs it.
    rows = {row.sequence: row for row in trace.step(drafts=4)}
    assert trace.scheduler.preemptions == 0
    assert rows[young].count == 1
    assert rows[old].draft_len == 0


def test_the_block_of_a_rejected_draft_is_free_for_others() -> None:
    trace = Trace(blocks=7, rows=2, chunk=1000)
    trace.add(44, 40)
    trace.step()
    trace.step(drafts=4)  # all rejected; the last was in a fourth block
    assert trace.cache.used_blocks == 4
    young = trace.add(60, 40)  # needs the other four
    assert young in [row.sequence for row in trace.step()]
    assert trace.cache.used_blocks == 7


def test_a_full_queue_refuses() -> None:
    trace = Trace(blocks=40, rows=2, chunk=1000, max_waiting=3)
    for _ in range(5):  # two for the rows, three to wait
        trace.add(10, 5)
    with pytest.raises(DraftgateError, match="queue is full") as caught:
        trace.add(10, 5)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    trace.step()
    with pytest.raises(DraftgateError, match="queue is full"):
        trace.add(10, 5)
    trace.remove(trace.live[0])
    trace.step()
    trace.add(10, 5)


def test_a_long_prompt_takes_smaller_chunks_while_others_decode() -> None:
    """The longer its context, the dearer a prompt's token is for the rows that wait."""
    trace = Trace(blocks=1000, rows=2, chunk=128, longest=4096)
    alone = trace.add(4000, 8)
    assert [row.count for _ in range(3) for row in trace.step()] == [128] * 3
    trace.remove(alone)
    decoding = trace.add(8, 1000)
    trace.step()
    prompt = trace.add(4000, 8)
    chunks = []
    while prompt.computed < 4000:
        rows = {row.sequence.row_id: row.count for row in trace.step()}
        assert rows[decoding.row_id] == 1
        chunks.append(rows[prompt.row_id])
    assert sum(chunks) == 4000
    assert chunks[0] == 128
    assert all(later <= earlier for earlier, later in itertools.pairwise(chunks))
    assert 16 <= chunks[-2] < 32
