"""The bounded hand-over of chunks: order, limits, ends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.buffer import BufferLimits, ChunkBuffer
from draftgate.upstream.types import Chunk


def chunk(index: int, finish_reason: str = "", size_bytes: int = 10) -> Chunk:
    return Chunk(
        index=index,
        text=str(index),
        token_ids=(index,),
        steps=(),
        gate_reason=0,
        batch_rows=1,
        finish_reason=finish_reason,
        size_bytes=size_bytes,
    )


async def drain(buffer: ChunkBuffer) -> list[int]:
    found = []
    while (got := await buffer.get()) is not None:
        found.append(got.index)
    return found


@given(order=st.permutations(range(8)))
def test_any_order_comes_out_in_order(order: list[int]) -> None:
    async def run() -> list[int]:
        buffer = ChunkBuffer(BufferLimits())
        reading = asyncio.create_task(drain(buffer))
        for index in order:
            buffer.put(chunk(index, "eos" if index == 7 else ""))
            await asyncio.sleep(0)
        assert buffer.finished
        return await reading

    assert asyncio.run(run()) == list(range(8))


@pytest.mark.parametrize(
    "limits", [BufferLimits(max_chunks=3), BufferLimits(max_bytes=35)], ids=["count", "bytes"]
)
async def test_reading_makes_room_and_lagging_does_not(limits: BufferLimits) -> None:
    buffer = ChunkBuffer(limits)
    for index in range(20):
        buffer.put(chunk(index))
        await buffer.get()
    for index in range(20, 23):
        buffer.put(chunk(index))
    with pytest.raises(DraftgateError, match="read too slowly") as caught:
        buffer.put(chunk(23))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    buffer.fail(caught.value)
    with pytest.raises(DraftgateError, match="read too slowly"):
        await buffer.get()


async def test_chunks_that_wait_for_an_earlier_one_count_too() -> None:
    buffer = ChunkBuffer(BufferLimits(max_chunks=3))
    for index in (1, 2, 3):
        buffer.put(chunk(index))
    with pytest.raises(DraftgateError, match="read too slowly"):
        buffer.put(chunk(4))


async def test_a_failure_comes_behind_what_waits_or_in_its_place() -> None:
    error = DraftgateError(ErrorCode.INTERNAL, "broken")
    behind, at_once = ChunkBuffer(BufferLimits()), ChunkBuffer(BufferLimits())
    for buffer in (behind, at_once):
        buffer.put(chunk(0))
    behind.fail(error)
    at_once.fail(error, at_once=True)
    assert await behind.get() == chunk(0)
    for buffer in (behind, at_once):
        with pytest.raises(DraftgateError, match="broken"):
            await buffer.get()


async def test_nothing_changes_behind_the_last_chunk() -> None:
    buffer = ChunkBuffer(BufferLimits())
    buffer.put(chunk(0, "eos"))
    buffer.fail(DraftgateError(ErrorCode.INTERNAL, "late"), at_once=True)
    assert await drain(buffer) == [0]


async def test_chunks_behind_the_last_one_are_an_error() -> None:
    buffer = ChunkBuffer(BufferLimits())
    buffer.put(chunk(1))
    with pytest.raises(DraftgateError, match="behind the last"):
        buffer.put(chunk(0, "eos"))
