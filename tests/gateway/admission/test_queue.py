"""Who is next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.gateway.admission import Priority
from draftgate.gateway.admission.queue import FairQueue

Item = tuple[str, int]

_TENANTS = st.sampled_from(["a", "b", "c"])
_PUSHES = st.lists(st.tuples(_TENANTS, st.sampled_from(Priority), st.integers(1, 50)), max_size=40)


def push(
    queue: FairQueue[Item],
    tenant: str,
    number: int,
    *,
    priority: Priority = Priority.INTERACTIVE,
    weight: float = 1.0,
    cost: float = 1.0,
) -> None:
    queue.push((tenant, number), tenant=tenant, weight=weight, cost=cost, priority=priority)


def popped(queue: FairQueue[Item], count: int) -> list[Item]:
    return [queue.pop() for _ in range(count)]


def test_nobody_waits() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_tenant_alone_is_served_in_order() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    for number in range(5):
        push(queue, "a", number, cost=10 - number)
    assert popped(queue, 5) == [("a", number) for number in range(5)]


def test_tenants_take_turns_however_many_they_have_waiting() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    for number in range(100):
        push(queue, "greedy", number)
    push(queue, "modest", 0)
    push(queue, "modest", 1)
    assert Counter(tenant for tenant, _ in popped(queue, 4))["modest"] == 2


def test_starts_follow_the_weights() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    for number in range(60):
        push(queue, "a", number, weight=1)
        push(queue, "b", number, weight=3)
    assert Counter(tenant for tenant, _ in popped(queue, 40)) == {"a": 10, "b": 30}


def test_large_requests_count_for_more() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    for number in range(60):
        push(queue, "large", number, cost=400)
        push(queue, "small", number, cost=100)
    assert Counter(tenant for tenant, _ in popped(queue, 40)) == {"large": 8, "small": 32}


def test_idleness_saves_up_nothing() -> None:
    queue: FairQueue[Item] = FairQueue(8)
    for number in range(60):
        push(queue, "busy", number)
    popped(queue, 20)
    for number in range(40):
        push(queue, "late", number)
    assert Counter(tenant for tenant, _ in popped(queue, 20)) == {"busy": 10, "late": 10}


def test_interactive_goes_first_and_batch_does_not_starve() -> None:
    queue: FairQueue[Item] = FairQueue(4)
    for number in range(40):
        push(queue, "batch", number, priority=Priority.BATCH)
        push(queue, "human", number)
    starts = [tenant for tenant, _ in popped(queue, 15)]
    assert starts == (["human"] * 4 + ["batch"]) * 3


def test_batch_has_no_credit_from_times_when_it_did_not_wait() -> None:
    queue: FairQueue[Item] = FairQueue(4)
    for number in range(20):
        push(queue, "human", number)
    popped(queue, 10)
    push(queue, "batch", 0, priority=Priority.BATCH)
    assert [tenant for tenant, _ in popped(queue, 5)] == ["human"] * 4 + ["batch"]


@given(pushes=_PUSHES, data=st.data())
def test_everything_comes_out_once_whatever_leaves_meanwhile(
    pushes: list[tuple[str, Priority, int]], data: st.DataObject
) -> None:
    queue: FairQueue[Item] = FairQueue(3)
    waiting: dict[Item, tuple[str, Priority]] = {}
    came_out: list[Item] = []
    for number, (tenant, priority, cost) in enumerate(pushes):
        push(queue, tenant, number, priority=priority, cost=cost)
        waiting[tenant, number] = (tenant, priority)
        choice = data.draw(st.sampled_from(["stay", "leave", "pop"]))
        if choice == "leave":
            item = data.draw(st.sampled_from(sorted(waiting)))
            tenant, priority = waiting.pop(item)
            queue.remove(item, tenant=tenant, priority=priority)
        elif choice == "pop":
            assert queue.peek() in waiting
            item = queue.pop()
            del waiting[item]
            came_out.append(item)
        assert len(queue) == len(waiting)
    rest = popped(queue, len(waiting))
    assert sorted(rest) == sorted(waiting)
    assert queue.peek() is None
    assert not set(came_out) & set(rest)


@given(pushes=_PUSHES)
def test_one_tenant_and_priority_keep_their_order(
    pushes: list[tuple[str, Priority, int]],
) -> None:
    queue: FairQueue[Item] = FairQueue(3)
    lanes: dict[Item, Priority] = {}
    for number, (tenant, priority, cost) in enumerate(pushes):
        push(queue, tenant, number, priority=priority, cost=cost)
        lanes[tenant, number] = priority
    order = popped(queue, len(pushes))
    for tenant in "abc":
        for priority in Priority:
            own = [item for item in order if item[0] == tenant and lanes[item] is priority]
            assert own == sorted(own)


@given(
    costs=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=30, max_size=60),
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_the_shares_of_two_never_drift_apart(
    costs: list[tuple[int, int]], weights: tuple[int, int]
) -> None:
    queue: FairQueue[Item] = FairQueue(3)
    cost: dict[Item, int] = {}
    for number, pair in enumerate(costs):
        for index, tenant in enumerate("ab"):
            push(queue, tenant, number, cost=pair[index], weight=weights[index])
            cost[tenant, number] = pair[index]
    served = {"a": 0.0, "b": 0.0}
    left = Counter({"a": len(costs), "b": len(costs)})
    while min(left.values()) > 0:
        item = queue.pop()
        served[item[0]] += cost[item] / weights["ab".index(item[0])]
        left[item[0]] -= 1
        # No further apart than the largest request of either.
        assert abs(served["a"] - served["b"]) <= 100


@settings(max_examples=50)
@given(
    others=st.lists(_TENANTS, max_size=20),
    tenant=_TENANTS,
    batch=st.integers(0, 5),
    interactive_per_batch=st.integers(1, 5),
    priority=st.sampled_from(Priority),
)
def test_who_is_ahead_is_foreseen_for_equal_costs(
    others: list[str], tenant: str, batch: int, interactive_per_batch: int, priority: Priority
) -> None:
    queue: FairQueue[Item] = FairQueue(interactive_per_batch)
    for number, other in enumerate(others):
        push(queue, other, number)
    for number in range(batch):
        push(queue, "batch", number, priority=Priority.BATCH)
    foreseen = queue.ahead(tenant, priority)
    push(queue, tenant, 999, priority=priority)
    order = popped(queue, len(queue))
    # Exact up to who of two in the same position goes first.
    assert abs(order.index((tenant, 999)) - foreseen) <= 3 + 3 // interactive_per_batch
