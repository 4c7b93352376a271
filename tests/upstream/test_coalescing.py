"""Chunks made one: what they say together, and when they wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.contract import DraftSource
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.buffer import BufferLimits, ChunkBuffer
from draftgate.upstream.coalescing import Coalescing, CoalescingConfig, follows, merged
from draftgate.upstream.types import Chunk, PromptReport, TokenAlternative, VerifyStep

FOR_EVER_MS = 1e7
"""A beat that no test lives to see."""


def chunk(index: int, *tokens: int, **fields: Any) -> Chunk:
    given: dict[str, Any] = {
        "text": f"{index} ",
        "token_ids": tokens or (index,),
        "steps": (),
        "gate_reason": index,
        "batch_rows": index + 1,
        "finish_reason": "",
        "size_bytes": 10,
    }
    return Chunk(index, **(given | fields))


def step(drafted: int, accepted: int) -> VerifyStep:
    return VerifyStep(drafted, accepted, DraftSource.NGRAM, tuple(range(drafted)))


@st.composite
def chunks(draw: st.DrawFn) -> list[Chunk]:
    """A stream as an engine sends it, but for the last chunk: with steps or without."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        counts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
        steps = tuple(step(accepted + rejected, accepted) for accepted, rejected in counts)
        tokens = sum(each.accepted + 1 for each in steps) or draw(st.integers(0, 2))
        ids = tuple(100 * index + place for place in range(tokens))
        text = draw(st.text(max_size=4))
        found.append(replace(chunk(index), text=text, token_ids=ids, steps=steps))
    return found


def flags(found: list[Chunk]) -> list[tuple[int, bool]]:
    """Every token, and whether it was drafted."""
    told = []
    for each in found:
        drafted = [place < s.accepted for s in each.steps for place in range(s.accepted + 1)]
        drafted += [False] * (len(each.token_ids) - len(drafted))
        told += list(zip(each.token_ids, drafted, strict=True))
    return told


@given(chunks())
def test_one_says_what_all_said(parts: list[Chunk]) -> None:
    one = merged(parts)
    assert one.text == "".join(part.text for part in parts)
    assert flags([one]) == flags(parts)
    assert [s for s in one.steps if s.drafted] == [s for p in parts for s in p.steps if s.drafted]
    assert (one.gate_reason, one.batch_rows) == (parts[-1].gate_reason, parts[-1].batch_rows)
    assert one.index == 0
    assert one.size_bytes == 10 * len(parts)
    assert not one.finish_reason


def test_what_was_told_of_the_prompt_and_of_single_tokens_stays() -> None:
    report = PromptReport(prompt_tokens=3, cached_tokens=1, queue_us=2, prefill_us=4)
    alternatives = ((TokenAlternative(7, -0.5),),)
    told = {"logprobs": (-0.25,), "alternatives": alternatives}
    one = merged([chunk(0, 5, prompt=report, **told), chunk(1, 6, **told)])
    assert one.prompt == report
    assert one.logprobs == (-0.25, -0.25)
    assert one.alternatives == alternatives * 2


def test_what_does_not_fit_stays_apart() -> None:
    plain = chunk(0)
    assert follows(plain, chunk(1))
    for other in (
        chunk(1, finish_reason="length"),
        chunk(1, logprobs=(-1.0,)),
        chunk(1, alternatives=((TokenAlternative(1, -1.0),),)),
    ):
        assert not follows(plain, other)
        assert not follows(other, plain)


Make = Callable[..., ChunkBuffer]


@pytest.fixture
async def busy() -> AsyncIterator[Make]:
    """Buffers of a gateway that is always busy, whose next beat is far away unless said."""

    def make(max_delay_ms: float = FOR_EVER_MS, **options: Any) -> ChunkBuffer:
        coalescing = Coalescing(CoalescingConfig(0, max_delay_ms))
        return ChunkBuffer(BufferLimits(), coalescing, **options)

    async with asyncio.timeout(20):
        yield make


async def waits(task: asyncio.Task[Chunk | None]) -> bool:
    """Whether nothing but time could end it."""
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_the_first_chunk_does_not_wait_and_the_last_ends_the_wait(busy: Make) -> None:
    buffer = busy()
    buffer.put(chunk(0))
    assert await buffer.get() == chunk(0)
    buffer.put(chunk(1))
    getting = asyncio.create_task(buffer.get())
    assert await waits(getting)
    buffer.put(chunk(2))
    assert await waits(getting)
    last = chunk(3, finish_reason="eos")
    buffer.put(last)
    assert await getting == merged([chunk(1), chunk(2)])
    assert await buffer.get() == last
    assert await buffer.get() is None


async def test_a_failure_ends_the_wait_too(busy: Make) -> None:
    error = DraftgateError(ErrorCode.INTERNAL, "broken")
    for at_once in (False, True):
        buffer = busy()
        buffer.put(chunk(0))
        await buffer.get()
        buffer.put(chunk(1))
        getting = asyncio.create_task(buffer.get())
        assert await waits(getting)
        buffer.fail(error, at_once=at_once)
        if not at_once:
            assert await getting == chunk(1)
            getting = asyncio.create_task(buffer.get())
        with pytest.raises(DraftgateError, match="broken"):
            await getting


async def test_who_wants_chunks_at_once_gets_them_but_what_waits_as_one(busy: Make) -> None:
    buffer = busy(wait=False)
    for index in range(4):
        buffer.put(chunk(index))
        if index < 2:
            assert await buffer.get() == chunk(index)
    assert await buffer.get() == merged([chunk(2), chunk(3)])


async def test_a_beat_is_for_all_that_wait() -> None:
    coalescing = Coalescing(CoalescingConfig(0, 20))
    buffers = [ChunkBuffer(BufferLimits(), coalescing) for _ in range(3)]
    for buffer in buffers:
        buffer.put(chunk(0))
        await buffer.get()
        buffer.put(chunk(1))
    getting = [asyncio.create_task(buffer.get()) for buffer in buffers]
    assert await waits(getting[0])
    for buffer in buffers:
        buffer.put(chunk(2))
    await asyncio.wait(getting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    assert [task.done() for task in getting] == [True] * 3
    assert {task.result() == merged([chunk(1), chunk(2)]) for task in getting} == {True}


async def test_a_consumer_that_was_cancelled_while_it_waited_loses_nothing(busy: Make) -> None:
    buffer = busy(max_delay_ms=20)
    buffer.put(chunk(0))
    await buffer.get()
    buffer.put(chunk(1))
    getting = asyncio.create_task(buffer.get())
    assert await waits(getting)
    getting.cancel()
    await asyncio.wait({getting})
    buffer.put(chunk(2))
    assert await buffer.get() == merged([chunk(1), chunk(2)])


async def test_else_every_chunk_comes_alone() -> None:
    buffer = ChunkBuffer(BufferLimits(), Coalescing(CoalescingConfig(busy_chunks_per_s=1e9)))
    for index in range(9):
        buffer.put(chunk(index))
    assert [await buffer.get() for _ in range(9)] == [chunk(index) for index in range(9)]


async def test_a_consumer_that_lags_gets_what_waits_as_one() -> None:
    buffer = ChunkBuffer(BufferLimits(), Coalescing(CoalescingConfig(busy_chunks_per_s=1e9)))
    parts = [chunk(index) for index in range(40)]
    for part in parts:
        buffer.put(part)
    assert await buffer.get() == merged(parts)


async def test_what_becomes_one_has_a_limit() -> None:
    buffer = ChunkBuffer(BufferLimits(), Coalescing(CoalescingConfig(0)), wait=False)
    parts = [chunk(index, size_bytes=25_000) for index in range(4)]
    for part in parts:
        buffer.put(part)
    assert await buffer.get() == merged(parts[:2])
    assert await buffer.get() == merged(parts[2:])


async def test_room_is_made_by_all_that_are_taken() -> None:
    limits = BufferLimits(max_bytes=100)
    buffer = ChunkBuffer(limits, Coalescing(CoalescingConfig(0)), wait=False)
    for start in range(0, 50, 10):
        for index in range(start, start + 10):
            buffer.put(chunk(index))
        got = await buffer.get()
        assert got is not None
        assert got.size_bytes == 100


async def test_how_busy_it_is_follows_what_comes() -> None:
    coalescing = Coalescing(CoalescingConfig(busy_chunks_per_s=100.0))
    assert not coalescing.busy
    for _ in range(1000):
        coalescing.count()
    assert not coalescing.busy  # It is counted over a while.
    await asyncio.sleep(0.3)
    assert coalescing.busy
    await asyncio.sleep(0.3)
    assert not coalescing.busy
