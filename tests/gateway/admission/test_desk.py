"""Who starts, who waits, who is refused: with the time handed in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.errors import DraftgateError, ErrorCode, Refusal
from draftgate.gateway.admission import AdmissionConfig, Ask, Capacity, Desk, Priority, Seat
from draftgate.gateway.tenant import ANONYMOUS, Tenant, TenantLimits


def ask(
    tenant: Tenant = ANONYMOUS,
    *,
    priority: Priority = Priority.INTERACTIVE,
    prompt: int = 10,
    output: int = 90,
    deadline_ms: int | None = None,
) -> Ask:
    return Ask(
        tenant=tenant,
        priority=priority,
        prompt_tokens=prompt,
        prompt_field="prompt",
        max_tokens=output,
        deadline_ms=deadline_ms,
    )


def desk(rows: int = 2, *, kv_tokens: int = 0, **config: object) -> Desk:
    made = Desk(AdmissionConfig(**config), 0.0)  # type: ignore[arg-type]
    made.capacity = Capacity(rows, kv_tokens)
    return made


def entered(where: Desk, count: int, now_s: float = 0.0, given: Ask | None = None) -> list[Seat]:
    """So many seats, started as far as there is room."""
    seats = []
    for _ in range(count):
        seats.append(where.enter(given or ask(), now_s))
        started(where, now_s)
    return seats


def started(where: Desk, now_s: float = 0.0) -> list[Seat]:
    found = []
    while (seat := where.start(now_s)) is not None:
        found.append(seat)
    return found


def refused(where: Desk, given: Ask, now_s: float = 0.0) -> tuple[DraftgateError, Refusal]:
    with pytest.raises(DraftgateError) as caught:
        where.enter(given, now_s)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.refusal is not None
    return caught.value, caught.value.refusal


def seat_or_none(where: Desk, given: Ask, now_s: float) -> Seat | None:
    """None for one that was refused, as it should be."""
    try:
        return where.enter(given, now_s)
    except DraftgateError as error:
        refusal = error.refusal
    assert refusal is not None
    assert 0.1 <= refusal.retry_after_s <= 60
    return None


def paced(rows: int, hold_s: float, **config: object) -> tuple[Desk, list[Seat]]:
    """A desk that is full, and whose generations have been found to take so long."""
    where = desk(rows, **config)
    for turn in range(20):
        for seat in entered(where, rows, turn * hold_s):
            where.leave(seat, 0, (turn + 1) * hold_s)
    return where, entered(where, rows, 20 * hold_s)


def test_as_many_run_as_the_engine_has_rows() -> None:
    where = desk(3)
    seats = entered(where, 5)
    assert [seat.started_s is not None for seat in seats] == [True] * 3 + [False] * 2
    where.leave(seats[0], 100, 1.0)
    assert started(where, 1.0) == [seats[3]]
    assert (where.running, where.waiting) == (3, 1)
    assert seats[3].waited_s == 1.0


def test_the_configuration_may_allow_fewer() -> None:
    where = desk(8, max_concurrency=1)
    entered(where, 3)
    assert (where.running, where.waiting) == (1, 2)


def test_the_kv_cache_limits_too() -> None:
    where = desk(8, kv_tokens=250, kv_overcommit=1.0)
    seats = entered(where, 3)
    assert (where.running, where.waiting) == (2, 1)
    where.leave(seats[0], 100, 0.0)
    assert started(where) == [seats[2]]


def test_what_is_larger_than_the_kv_cache_runs_alone() -> None:
    where = desk(8, kv_tokens=250, kv_overcommit=1.0)
    small = entered(where, 1)[0]
    large = where.enter(ask(output=1000), 0.0)
    after = where.enter(ask(), 0.0)
    assert started(where) == []  # The small one behind it does not push past.
    where.leave(small, 0, 0.0)
    assert started(where) == [large]
    where.leave(large, 0, 0.0)
    assert started(where) == [after]


def test_the_queue_is_bounded() -> None:
    where = desk(2, max_waiting=3)
    entered(where, 5)
    error, refusal = refused(where, ask())
    assert error.message == ("the server is full: 2 generations run and 3 wait, allowed: at most 3")
    assert refusal == Refusal("QUEUE_FULL", "server", retry_after_s=1.0)


def test_the_queue_is_sized_from_the_engine() -> None:
    where = desk(2)
    entered(where, 10)
    assert refused(where, ask())[1].reason == "QUEUE_FULL"


def test_without_a_queue_a_full_server_refuses() -> None:
    where = desk(1, max_waiting=0)
    seat = entered(where, 1)[0]
    assert refused(where, ask())[1].reason == "QUEUE_FULL"
    where.leave(seat, 0, 0.0)
    assert entered(where, 1)[0].started_s == 0.0


def test_retrying_is_advised_for_when_the_queue_will_have_drained() -> None:
    where, _ = paced(2, hold_s=4.0, max_waiting=3)
    entered(where, 3, 80.0)
    _, refusal = refused(where, ask(), 80.0)
    # Two rows that take 4 s each: one ends every 2 s, and three wait.
    assert refusal.retry_after_s == pytest.approx(6.0, rel=0.05)


def test_who_cannot_start_before_the_deadline_is_refused() -> None:
    where, _ = paced(2, hold_s=4.0)
    entered(where, 2, 80.0)
    error, refusal = refused(where, ask(deadline_ms=3000), 80.0)
    assert refusal.reason == "DEADLINE_TOO_SHORT"
    assert refusal.retry_after_s == pytest.approx(3.0, rel=0.1)
    assert error.message.endswith("after its deadline, which is in 3.0 s")
    assert where.enter(ask(deadline_ms=7000), 80.0).started_s is None


def test_a_deadline_matters_only_to_who_has_to_wait() -> None:
    where, seats = paced(2, hold_s=4.0)
    where.leave(seats[0], 0, 80.0)
    where.enter(ask(deadline_ms=1), 80.0)
    assert len(started(where, 80.0)) == 1


def test_nobody_knows_how_long_before_anything_ended() -> None:
    where = desk(1)
    entered(where, 2)
    assert where.enter(ask(deadline_ms=1), 0.0).started_s is None


def test_who_would_wait_longer_than_allowed_is_refused() -> None:
    where, _ = paced(1, hold_s=4.0, max_wait_s=10.0)
    entered(where, 2, 80.0)
    _, refusal = refused(where, ask(), 80.0)
    assert refusal.reason == "WAIT_TOO_LONG"
    assert refusal.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_an_urgent_request_is_not_judged_by_the_batch_queue() -> None:
    where, _ = paced(1, hold_s=1.0, max_waiting=20)
    entered(where, 10, 20.0, ask(priority=Priority.BATCH))
    batch = ask(priority=Priority.BATCH, deadline_ms=4000)
    assert refused(where, batch, 20.0)[1].reason == "DEADLINE_TOO_SHORT"
    where.enter(ask(deadline_ms=4000), 20.0)


def test_a_tenant_has_so_many_at_once() -> None:
    where = desk(8)
    acme = Tenant("acme", TenantLimits(max_concurrency=2))
    seats = entered(where, 2, given=ask(acme))
    error, refusal = refused(where, ask(acme))
    assert error.message == (
        "tenant 'acme' has 2 generations running or waiting, allowed: at most 2"
    )
    assert (refusal.reason, refusal.subject) == ("TENANT_CONCURRENCY", "tenant:acme")
    where.enter(ask(Tenant("other")), 0.0)
    where.leave(seats[0], 0, 0.0)
    where.enter(ask(acme), 0.0)


def test_a_tenant_has_so_many_tokens_a_minute() -> None:
    where = desk(8)
    acme = Tenant("acme", TenantLimits(tokens_per_minute=300))
    seats = entered(where, 3, given=ask(acme))
    error, refusal = refused(where, ask(acme), 10.0)
    assert refusal.reason == "TENANT_TOKENS"
    assert refusal.retry_after_s == pytest.approx(10.0)
    assert "'acme' has used up its 300 tokens per minute" in error.message
    where.leave(seats[0], 40, 10.0)  # 60 of its 100 come back, and 50 came with time.
    where.enter(ask(acme), 10.0)
    refused(where, ask(acme), 10.0)


def test_who_was_refused_is_not_charged() -> None:
    where = desk(1, max_waiting=0)
    acme = Tenant("acme", TenantLimits(tokens_per_minute=100, max_concurrency=1))
    seat = entered(where, 1)[0]
    for _ in range(10):
        assert refused(where, ask(acme))[1].reason == "QUEUE_FULL"
    where.leave(seat, 0, 0.0)
    where.enter(ask(acme), 0.0)


@pytest.mark.parametrize(
    ("limits", "given", "field", "message"),
    [
        (
            TenantLimits(max_prompt_tokens=9),
            {},
            "prompt",
            "prompt: got '10 tokens', allowed: at most 9 tokens for tenant 'acme'",
        ),
        (
            TenantLimits(tokens_per_minute=99),
            {},
            "max_tokens",
            "max_tokens: got 90, allowed: at most 99 tokens a minute for tenant 'acme', of which "
            "the prompt takes 10",
        ),
    ],
)
def test_what_is_never_allowed_is_the_requests_fault(
    limits: TenantLimits, given: dict[str, int], field: str, message: str
) -> None:
    with pytest.raises(DraftgateError) as caught:
        desk().enter(ask(Tenant("acme", limits), **given), 0.0)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert (caught.value.field, caught.value.message) == (field, message)
    assert caught.value.refusal is None


def test_new_limits_hold_from_the_next_request_on() -> None:
    where = desk(8)
    where.enter(ask(Tenant("acme", TenantLimits(tokens_per_minute=100))), 0.0)
    refused(where, ask(Tenant("acme", TenantLimits(tokens_per_minute=100))), 0.0)
    where.enter(ask(Tenant("acme", TenantLimits(tokens_per_minute=200))), 0.0)
    where.enter(ask(Tenant("acme")), 0.0)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(Priority),
        st.integers(1, 300),
        st.floats(0, 5),
    ),
    max_size=60,
)


@given(steps=_STEPS, rows=st.integers(1, 4), kv_tokens=st.sampled_from([0, 200]), data=st.data())
def test_the_limits_hold_whatever_happens(
    steps: Sequence[tuple[str, str, Priority, int, float]],
    rows: int,
    kv_tokens: int,
    data: st.DataObject,
) -> None:
    where = desk(rows, kv_tokens=kv_tokens, max_waiting=5, kv_overcommit=1.0)
    limits = TenantLimits(max_concurrency=6, tokens_per_minute=2000)
    seats: list[Seat] = []
    now_s = 0.0
    for what, name, priority, output, pause_s in steps:
        now_s += pause_s
        if what == "enter":
            seat = seat_or_none(
                where, ask(Tenant(name, limits), priority=priority, output=output), now_s
            )
            seats += [seat] if seat else []
        elif seats:
            seat = data.draw(st.sampled_from(seats))
            seats.remove(seat)
            where.leave(seat, data.draw(st.integers(0, seat.ask.tokens)), now_s)
        started(where, now_s)
        running = [seat for seat in seats if seat.started_s is not None]
        assert where.running == len(running) <= rows
        assert where.waiting == len(seats) - len(running) <= 5
        promised = sum(seat.ask.tokens for seat in running)
        assert not kv_tokens or promised <= kv_tokens or len(running) == 1
        # Nobody waits while there is nobody to wait for.
        assert running or not seats
    for seat in seats:
        where.leave(seat, 0, now_s)
    assert (where.running, where.waiting) == (0, 0)
