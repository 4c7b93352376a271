"""What the engine keeps of its steps, for whoever records them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.contract import DraftSource, GateReason
from draftgate.engine import Target
from draftgate.engine.drafters import Draft, DraftQuery
from draftgate.engine.step_log import StepLog
from draftgate.speculation import CostCurve, CostTable, Load, Mode, Policy, StepRecord
from tests.support.engine import (
    Running,
    ScriptedDrafter,
    Stream,
    greedy,
    running,
    use_drafter,
)
from tests.support.speculation import PROMPTS, VARIED, alone, oracle, unsteady

LONGEST = 4


def recorded(engine: Running) -> list[StepRecord]:
    """All steps so far."""
    found = engine.engine.steps_since(0, 100_000)
    assert found.lost == 0
    assert [each.step for each in found.steps] == list(range(1, found.last_step + 1))
    return list(found.steps)


def test_the_records_add_up_to_the_counters(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(tiny, VARIED)
    use_drafter(monkeypatch, unsteady(oracle(expected), seed=1))
    with running(tiny, draft_len=LONGEST, prefill_chunk_tokens=16) as engine:
        assert engine.run(PROMPTS, VARIED) == expected
        steps, counters = recorded(engine), engine.engine.counters()
    assert len(steps) == counters.steps
    assert sum(each.emitted for each in steps) == counters.emitted_tokens
    assert sum(each.drafted for each in steps) == counters.drafted_tokens > 0
    assert sum(each.accepted for each in steps) == counters.accepted_tokens > 0
    assert sum(len(each.outcomes) for each in steps) == counters.verify_steps
    assert sum(each.prefill_tokens for each in steps) == sum(map(len, PROMPTS.values()))
    for each in steps:
        assert each.drafted == sum(drafted for _, drafted, _ in each.outcomes)
        assert each.accepted == sum(accepted for _, _, accepted in each.outcomes)
        assert {source for source, _, _ in each.outcomes} <= {DraftSource.NGRAM}
        assert len(each.outcomes) <= each.rows <= len(PROMPTS)
        assert (each.draft_len, each.reason) == (LONGEST, GateReason.FIXED)
        assert each.expected_ms is None
        assert each.measured_ms > 0
        assert each.rows <= each.kv_tokens or not each.rows
    times = [each.time_s for each in steps]
    assert times == sorted(times)


@pytest.mark.parametrize("ceiling_ms", [None, 1e6])
def test_under_a_ceiling_a_prompt_joins_no_step_that_was_decided_on_without_it(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, ceiling_ms: float | None
) -> None:
    """It arrives while tokens are drafted. Elsewhere it need not wait for the next step."""
    late: list[Stream] = []

    def rule(query: DraftQuery) -> Draft:
        if not late and len(query.tokens) > 10:
            late.append(engine.submit("late", PROMPTS["1"], greedy(5)))
        return Draft((1,))

    use_drafter(monkeypatch, ScriptedDrafter(rule))
    with running(tiny, draft_len=LONGEST) as engine:
        policy = Policy(mode=Mode.FIXED, draft_len=1, max_step_ms=ceiling_ms)
        engine.engine.set_policy(policy)
        engine.one(PROMPTS["0"], greedy(20))
        late[0].wait()
        steps = recorded(engine)
    [joined] = [each for each in steps[1:] if each.prefill_tokens]
    assert joined.prefill_tokens == len(PROMPTS["1"])
    arrived_in = next(each.step for each in steps if each.kv_tokens >= 10)
    assert joined.step - arrived_in == (0 if ceiling_ms is None else 1)


def test_steps_without_a_drafter_are_kept_too(tiny: Target) -> None:
    with running(tiny, drafter="none") as engine:
        engine.one(PROMPTS["0"], greedy(5))
        steps = recorded(engine)
    assert len(steps) == 5
    assert [(each.rows, each.prefill_tokens) for each in steps] == [(0, 5), *[(1, 0)] * 4]
    for each in steps:
        assert (each.draft_len, each.reason, each.outcomes) == (0, GateReason.DISABLED, ())
        assert (each.drafted, each.accepted, each.emitted) == (0, 0, 1)


def test_what_is_not_verified_is_not_in_a_record(tiny: Target) -> None:
    """Though the n-gram drafter would have had something to say."""
    with running(tiny, drafter="ngram", draft_len=LONGEST) as engine:
        engine.engine.set_policy(Policy(Mode.OFF))
        engine.one((7, 8, 9, 10) * 4, greedy(12))
        steps = recorded(engine)
    assert {each.reason for each in steps} == {GateReason.OPERATOR}
    assert [(each.drafted, each.outcomes) for each in steps] == [(0, ())] * 12


def test_the_clock_is_the_engines(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 500.0

    def drafts_in_a_quarter(query: DraftQuery) -> Draft:
        nonlocal now_s
        now_s += 0.25
        return Draft((1,))

    use_drafter(monkeypatch, ScriptedDrafter(drafts_in_a_quarter))
    with running(tiny, clock=lambda: now_s, draft_len=1) as engine:
        engine.one(PROMPTS["0"], greedy(4))
        steps = recorded(engine)
    prefill, first, second, *_ = steps
    assert (prefill.time_s, prefill.measured_ms) == (0.0, 0.0)
    assert (first.time_s, first.measured_ms) == (0.0, 250.0)
    assert (second.time_s, second.measured_ms) == (0.25, 250.0)


def test_what_was_expected_is_beside_what_was_measured(tiny: Target) -> None:
    costs = CostTable({k: CostCurve((1, 64), (4.0 + k, 8.0 + k)) for k in (0, LONGEST)})
    with running(tiny, drafter="ngram", draft_len=LONGEST, started=False) as engine:
        engine.engine.use_costs(costs)
        engine.engine.start()
        engine.one(PROMPTS["3"], greedy(6))
        steps = recorded(engine)
    for each in steps:
        if each.rows:
            assert each.expected_ms is not None
            assert each.expected_ms > 0


def made(number: int) -> StepRecord:
    return StepRecord.of(
        None, [], Load(()), step=number, time_s=0.1 * number, emitted=1, measured_ms=1.0
    )


@given(
    kept=st.integers(1, 20),
    bursts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=12),
)
def test_a_reader_gets_each_step_or_hears_that_it_is_lost(
    kept: int, bursts: list[tuple[int, int]]
) -> None:
    """bursts: so many steps run, then so many are read at most."""
    log, ran, upto, lost = StepLog(kept), 0, 0, 0
    for steps, most in bursts:
        for _ in range(steps):
            ran += 1
            log.add(made(ran))
        found = log.since(upto, most)
        assert found.last_step == ran
        assert len(found.steps) == min(most, ran - upto - found.lost)
        assert found.lost == max(ran - kept - upto, 0)
        first = upto + found.lost + 1
        assert [each.step for each in found.steps] == [*range(first, first + len(found.steps))]
        lost += found.lost
        upto = found.steps[-1].step if found.steps else upto
    assert lost <= max(ran - kept, 0)
