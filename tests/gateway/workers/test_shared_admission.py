"""Places that several workers share, each asking at the end of its own link."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.tenant import Tenant, TenantLimits
from tests.support.admission import Holder, admission, ask
from tests.support.workers import Branch, branches, until


async def test_a_place_goes_from_one_worker_to_the_next() -> None:
    where = admission(1)
    async with branches(where) as (one, other):
        first = Holder(one.admission)
        await first.inside.wait()
        second = Holder(other.admission)
        await until(lambda: where.waiting == 1)
        assert await first.goes() == 0
        await second.inside.wait()
        assert await second.goes() > 0
        await until(lambda: (where.running, where.waiting) == (0, 0))


async def test_turns_are_fair_between_tenants_of_different_workers() -> None:
    where = admission(1, max_waiting=10)
    greedy, modest = Tenant("greedy"), Tenant("modest")
    order: list[str] = []

    async def run(branch: Branch, tenant: Tenant) -> None:
        async with branch.admission.admitted(ask(tenant)):
            order.append(tenant.name)

    async with branches(where) as (one, other):
        first = Holder(one.admission)
        await first.inside.wait()
        many = [asyncio.create_task(run(one, greedy)) for _ in range(5)]
        await until(lambda: where.waiting == 5)
        few = [asyncio.create_task(run(other, modest)) for _ in range(2)]
        await until(lambda: where.waiting == 7)
        await first.goes()
        await asyncio.gather(*many, *few)
    assert order[:4].count("modest") == 2


async def test_who_leaves_while_waiting_leaves_no_trace() -> None:
    where = admission(1)
    async with branches(where) as (one, other):
        first = Holder(one.admission)
        await first.inside.wait()
        second = Holder(other.admission)
        await until(lambda: where.waiting == 1)
        await second.is_cancelled()
        await until(lambda: where.waiting == 0)
        at_once = Holder(other.admission)
        await at_once.is_cancelled()  # Before it could even ask.
        await first.goes()
        await until(lambda: where.running == 0)


async def test_a_tenants_limits_hold_over_all_workers() -> None:
    where = admission(8)
    acme = Tenant("acme", TenantLimits(max_concurrency=2, tokens_per_minute=1000))
    async with branches(where) as (one, other):
        first, second = Holder(one.admission, ask(acme), 5), Holder(other.admission, ask(acme), 5)
        await first.inside.wait()
        await second.inside.wait()
        for each in (one, other):
            with pytest.raises(DraftgateError, match="has 2 generations running") as caught:
                async with each.admission.admitted(ask(acme)):
                    pass
            assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
            assert caught.value.refusal is not None
            assert caught.value.refusal.reason == "TENANT_CONCURRENCY"
            assert caught.value.refusal.subject == "tenant:acme"
        await first.goes()
        await second.goes()
        # What they used is charged, not what they might have: 990 are left.
        await until(lambda: where.running == 0)
        async with other.admission.admitted(replace(ask(acme), max_tokens=970)):
            with pytest.raises(DraftgateError, match="used up its 1000 tokens"):
                async with one.admission.admitted(ask(acme)):
                    pass


async def test_an_id_is_in_use_for_all_workers() -> None:
    async with branches(admission(8)) as (one, other):
        first = Holder(one.admission, ask(request_id="a"))
        await first.inside.wait()
        with pytest.raises(DraftgateError, match="request_id: a generation 'a' is running") as got:
            async with other.admission.admitted(ask(request_id="a")):
                pass
        assert (got.value.code, got.value.field) == (ErrorCode.ALREADY_EXISTS, "request_id")
        await first.goes()
        async with one.admission.admitted(ask(request_id="a")):
            pass


async def test_what_is_never_allowed_names_the_field() -> None:
    acme = Tenant("acme", TenantLimits(max_prompt_tokens=5))
    async with branches(admission(8)) as (one, _):
        with pytest.raises(DraftgateError, match="prompt: got '10 tokens'") as caught:
            async with one.admission.admitted(ask(acme)):
                pass
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "prompt")


async def test_a_worker_that_dies_gives_back_all_of_its_places() -> None:
    where = admission(2)
    async with branches(where) as (one, other):
        dying = [Holder(one.admission) for _ in range(4)]
        await until(lambda: (where.running, where.waiting) == (2, 2))
        waiting = Holder(other.admission)
        await until(lambda: where.waiting == 3)
        await one.close()
        await waiting.inside.wait()
        await waiting.goes()
        await until(lambda: (where.running, where.waiting) == (0, 0))
        for each in dying:
            await each.is_cancelled()


async def test_a_worker_that_closes_refuses_its_own_only() -> None:
    where = admission(1)
    async with branches(where) as (one, other):
        first = Holder(one.admission)
        await first.inside.wait()
        refused, waiting = Holder(one.admission), Holder(other.admission)
        await until(lambda: where.waiting == 2)
        one.admission.close()
        with pytest.raises(DraftgateError, match="is shutting down"):
            await refused.task
        with pytest.raises(DraftgateError, match="is shutting down"):
            async with one.admission.admitted(ask()):
                pass
        await first.goes()
        await waiting.inside.wait()
        await waiting.goes()


async def test_a_wait_has_an_end() -> None:
    where = admission(1, max_wait_s=0.01)
    async with branches(where) as (one, other):
        first = Holder(one.admission)
        await first.inside.wait()
        with pytest.raises(DraftgateError, match=r"waited 0\.01 s, the most allowed"):
            async with other.admission.admitted(ask()):
                pass
        await first.goes()


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 2)), max_size=30
    ),
    dying=st.sets(st.integers(0, 2), max_size=2),
)
def test_never_more_run_than_may_whatever_happens(
    steps: list[tuple[str, int]], dying: set[int]
) -> None:
    asyncio.run(_walk(steps, dying))


async def _walk(steps: list[tuple[str, int]], dying: set[int]) -> None:
    where = admission(2, max_waiting=100)
    holders: list[list[Holder]] = [[], [], []]
    async with branches(where, 3) as found:
        for what, index in steps:
            held = holders[index]
            if what == "enter":
                held.append(Holder(found[index].admission))
            elif what == "leave" and held:
                held.pop(0).leave.set()
            elif held:
                held.pop().task.cancel()
            await asyncio.sleep(0)
            inside = [each for held in holders for each in held if each.inside.is_set()]
            assert len(inside) <= where.running <= 2
        for index in dying:
            await found[index].close()
        alive = [each for index in {0, 1, 2} - dying for each in holders[index]]
        for each in alive:
            each.leave.set()
        # All that are left have their turn, once those of the dead are gone.
        await asyncio.wait_for(asyncio.gather(*(each.task for each in alive)), 30)
        await until(lambda: (where.running, where.waiting) == (0, 0))
        for index in dying:
            for each in holders[index]:
                await each.is_cancelled()
