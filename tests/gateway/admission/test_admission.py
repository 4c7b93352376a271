"""Waiting for a place."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admission import AdmissionConfig, Ask, Capacity, Priority
from draftgate.gateway.tenant import Tenant, TenantLimits
from tests.support.admission import Holder, admission, ask


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_place_that_comes_free_goes_to_the_next() -> None:
    where = admission(1)
    first, second = Holder(where), Holder(where)
    await settle()
    assert (first.inside.is_set(), second.inside.is_set()) == (True, False)
    first.leave.set()
    await second.inside.wait()
    assert await first.task == 0
    second.leave.set()
    assert await second.task > 0
    assert (where.running, where.waiting) == (0, 0)


async def test_who_leaves_while_waiting_leaves_no_trace() -> None:
    where = admission(1)
    first, second, third = Holder(where), Holder(where), Holder(where)
    await settle()
    second.task.cancel()
    await asyncio.wait({second.task})
    assert where.waiting == 1
    first.leave.set()
    await third.inside.wait()
    third.leave.set()
    await third.task
    assert (where.running, where.waiting) == (0, 0)


async def test_who_is_cancelled_at_its_turn_hands_it_on() -> None:
    where = admission(1)
    first, second, third = Holder(where), Holder(where), Holder(where)
    await settle()
    first.leave.set()
    await first.task  # The second one's turn has come, and it does not know yet.
    second.task.cancel()
    await asyncio.wait({second.task})
    assert second.task.cancelled()
    await third.inside.wait()
    third.leave.set()
    await third.task
    assert (where.running, where.waiting) == (0, 0)


async def test_a_failure_inside_gives_the_place_back() -> None:
    where = admission(1)
    with pytest.raises(ValueError, match="inside"):
        async with where.admitted(ask()):
            raise ValueError("inside")
    assert where.running == 0


async def test_a_wait_has_an_end() -> None:
    where = admission(1, max_wait_s=0.01)
    first = Holder(where)
    await settle()
    with pytest.raises(DraftgateError, match=r"waited 0\.01 s, the most allowed") as caught:
        async with where.admitted(ask()):
            pass
    assert caught.value.refusal is not None
    assert caught.value.refusal.reason == "WAIT_TOO_LONG"
    first.leave.set()
    await first.task
    assert (where.running, where.waiting) == (0, 0)


async def test_more_capacity_starts_who_waits() -> None:
    where = admission(1)
    holders = [Holder(where) for _ in range(3)]
    await settle()
    where.set_capacity(Capacity(3))
    for each in holders:
        await each.inside.wait()
        each.leave.set()
        await each.task


async def test_closing_turns_away_who_waits_and_lets_the_rest_finish() -> None:
    where = admission(1)
    first, second = Holder(where), Holder(where)
    await settle()
    where.close()
    with pytest.raises(DraftgateError, match="is shutting down") as caught:
        await second.task
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(DraftgateError, match="is shutting down"):
        async with where.admitted(ask()):
            pass
    first.leave.set()
    await first.task
    assert (where.running, where.waiting) == (0, 0)


async def test_what_was_used_is_what_is_charged() -> None:
    where = admission(8)
    acme = Tenant("acme", TenantLimits(tokens_per_minute=100))
    holder = Holder(where, ask(acme), used=1)
    await holder.inside.wait()
    with pytest.raises(DraftgateError, match="used up its 100 tokens"):
        async with where.admitted(ask(acme)):
            pass
    holder.leave.set()
    await holder.task
    small = Ask(acme, Priority.INTERACTIVE, 9, "prompt", 90)
    async with where.admitted(small):
        assert where.running == 1


async def test_an_id_is_in_use_while_it_waits_too() -> None:
    where = admission(1)
    holders = [Holder(where, ask(request_id=name)) for name in ("a", "b")]
    await settle()
    for name in ("a", "b"):
        with pytest.raises(DraftgateError, match=f"a generation '{name}' is running") as caught:
            async with where.admitted(ask(request_id=name)):
                pass
        assert (caught.value.code, caught.value.field) == (ErrorCode.ALREADY_EXISTS, "request_id")
    for each in holders:
        await each.goes()
    async with where.admitted(ask(request_id="b")):
        pass


async def test_other_limits_hold_from_when_they_are_set() -> None:
    where = admission(1)
    holders = [Holder(where) for _ in range(3)]
    await settle()
    where.configure(AdmissionConfig(max_concurrency=2, max_waiting=1))
    await settle()
    assert (where.running, where.waiting) == (2, 1)
    with pytest.raises(DraftgateError, match="allowed: at most 1"):
        async with where.admitted(ask()):
            pass
    for each in holders:
        await each.goes()
