"""What the gate decides, why, and that a token drawn has no say in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from draftgate.contract import GateReason
from draftgate.errors import DraftgateError
from draftgate.speculation import (
    CostCurve,
    CostTable,
    Decision,
    Gate,
    GateSettings,
    Load,
    Mode,
    Outcome,
    Policy,
    RowLoad,
)

LENS = (0, 1, 2, 4, 8)


def costs(token_ms: float = 0.1, draft_ms: float = 0.5, pass_ms: float = 10.0) -> CostTable:
    """A pass costs so much and each of its tokens, a draft step so much."""
    tokens = (1, 4096)
    return CostTable(
        {
            k: CostCurve(tokens, tuple(pass_ms + draft_ms * k + token_ms * t for t in tokens))
            for k in LENS
        }
    )


def load(rows: int, *, left: int = 100, caps: Sequence[int | None] = (), prefill: int = 0) -> Load:
    caps = [*caps, *[None] * (rows - len(caps))]
    return Load([RowLoad(i, left, cap) for i, cap in enumerate(caps)], prefill, 50 * rows)


def drive(
    gate: Gate,
    rate: float,
    rows: int,
    steps: int,
    *,
    true_costs: CostTable | None = None,
    seed: int = 0,
    left: int = 100,
    jitter: float = 0.0,
    took_ms: list[float] | None = None,
) -> list[Decision]:
    """Run the gate where drafts are accepted at this conditional rate. jitter: of a step's time,
    over that time. took_ms: gets how long each took."""
    random = np.random.default_rng(seed)
    true_costs = true_costs or gate.costs
    assert true_costs is not None
    decisions = []
    for _ in range(steps):
        now = load(rows, left=left)
        decision = gate.decide(now)
        outcomes = []
        for row, drafted in zip(now.rows, decision.row_lens, strict=True):
            stood = int((random.random(drafted) < rate).cumprod().sum())
            outcomes.append(Outcome(row.row_id, 1, drafted, range(stood)))
        ms = true_costs.step_ms(decision.draft_len, decision.tokens_in_pass, now.kv_tokens)
        if jitter:
            ms *= float(np.exp(jitter * random.standard_normal()))
        gate.observe(decision, outcomes, now, ms)
        decisions.append(decision)
        if took_ms is not None:
            took_ms.append(ms)
    return decisions


def settled(decisions: Sequence[Decision]) -> set[int]:
    """The draft lengths of the last steps, probes apart."""
    return {d.draft_len for d in decisions[-40:] if d.reason is not GateReason.PROBE}


def test_it_finds_the_draft_length_of_most_tokens_a_second() -> None:
    for rows, rate in ((1, 0.9), (1, 0.5), (8, 0.7), (32, 0.7), (200, 0.6)):
        gate = Gate(LENS, costs())
        found = settled(drive(gate, rate, rows, 400))
        speeds = {
            k: rows * sum(rate**j for j in range(k + 1)) / costs().step_ms(k, rows * (k + 1))
            for k in LENS
        }
        assert all(speeds[k] > 0.96 * max(speeds.values()) for k in found), (rows, rate, found)


def test_its_reasons_say_why() -> None:
    assert drive(Gate(LENS, costs()), 0.9, 1, 100)[-1].reason is GateReason.GAIN
    poor = drive(Gate(LENS, costs(draft_ms=3.0)), 0.05, 1, 300)
    assert {d.reason for d in poor[-100:]} <= {GateReason.LOW_ACCEPTANCE, GateReason.PROBE}
    full = drive(Gate(LENS, costs(token_ms=10.0)), 0.8, 64, 100)
    assert {d.reason for d in full[-50:]} <= {GateReason.COMPUTE_BOUND, GateReason.PROBE}
    assert settled(poor) == settled(full) == {0}
    gate = Gate(LENS, costs(), Policy(max_step_ms=11.0))
    held = drive(gate, 0.9, 2, 100)
    assert held[-1].reason is GateReason.ITL_CEILING
    assert all(d.expected_ms <= 11.0 for d in held)
    assert gate.reasons[GateReason.ITL_CEILING] > 50


@pytest.mark.parametrize(("jitter", "draft_len"), [(0.01, 4), (0.05, 4), (0.1, 2)])
def test_hardly_any_step_takes_longer_than_the_ceiling(jitter: float, draft_len: int) -> None:
    """However much steps vary, and no more room is left for that than it takes."""
    ceiling_ms = 16.0
    assert settled(drive(Gate(LENS, costs()), 0.9, 2, 200)) == {8}
    gate, took_ms = Gate(LENS, costs(), Policy(max_step_ms=ceiling_ms)), list[float]()
    decisions = drive(gate, 0.9, 2, 3000, jitter=jitter, took_ms=took_ms)
    assert float((np.array(took_ms[200:]) > ceiling_ms).mean()) < 0.01
    assert np.median([d.draft_len for d in decisions[200:]]) == draft_len


def test_where_no_step_is_within_the_ceiling_the_quickest_is_taken() -> None:
    gate = Gate(LENS, costs(), Policy(max_step_ms=1.0))
    assert settled(drive(gate, 0.9, 2, 60)) == {0}


def test_rows_keep_to_their_limits() -> None:
    gate = Gate(LENS, costs(), Policy(Mode.FIXED, draft_len=4))
    now = Load(
        [RowLoad(0, 100), RowLoad(1, 2), RowLoad(2, 100, 1), RowLoad(3, 0), RowLoad(4, 9, 0)]
    )
    decision = gate.decide(now)
    assert decision.row_lens == (4, 2, 1, 0, 0)
    assert decision.row_reasons[1:] == (
        GateReason.BUDGET,
        GateReason.REQUEST_CAP,
        GateReason.BUDGET,
        GateReason.REQUEST_CAP,
    )
    assert decision.tokens_in_pass == 5 + 7


def test_rows_near_their_end_do_not_count_for_long_drafts() -> None:
    [short] = settled(drive(Gate(LENS, costs()), 0.95, 4, 200, left=1))
    [long] = settled(drive(Gate(LENS, costs()), 0.95, 4, 200, left=50))
    assert short <= 1 < long


def test_an_operator_decides() -> None:
    gate = Gate(LENS, costs())
    drive(gate, 0.9, 1, 50)
    gate.set_policy(Policy(Mode.OFF))
    off = drive(gate, 0.9, 1, 50)
    assert {(d.draft_len, d.reason) for d in off} == {(0, GateReason.OPERATOR)}
    gate.set_policy(Policy(Mode.FIXED, draft_len=2))
    assert {(d.draft_len, d.reason) for d in drive(gate, 0.9, 1, 9)} == {(2, GateReason.OPERATOR)}
    gate.set_policy(Policy(max_draft_len=1))
    assert {d.draft_len for d in drive(gate, 0.9, 1, 50)} <= {0, 1}
    with pytest.raises(DraftgateError, match="draft_len: got 9, allowed: an integer 0 to 8"):
        gate.set_policy(Policy(Mode.FIXED, draft_len=9))
    assert gate.policy == Policy(max_draft_len=1)
    gate.set_policy(Policy(max_draft_len=0))
    assert {(d.draft_len, d.reason) for d in drive(gate, 0.9, 1, 9)} == {(0, GateReason.OPERATOR)}


def test_without_costs_it_drafts_what_is_configured() -> None:
    fixed = Gate((0, 3), None, Policy(Mode.FIXED, draft_len=3)).decide(load(2))
    assert (fixed.row_lens, fixed.reason) == ((3, 3), GateReason.FIXED)
    assert fixed.speedup is None
    never = Gate((0,), None, Policy(Mode.FIXED)).decide(load(2))
    assert (never.row_lens, never.reason) == ((0, 0), GateReason.DISABLED)


def test_nothing_to_decode_is_nothing_to_draft() -> None:
    decision = Gate(LENS, costs()).decide(load(0, prefill=64))
    assert (decision.draft_len, decision.row_lens) == (0, ())


@pytest.mark.parametrize("mode", list(Mode))
def test_nothing_to_decode_promises_nothing(mode: Mode) -> None:
    decision = Gate(LENS, costs(), Policy(mode, draft_len=2)).decide(load(0, prefill=64))
    assert (decision.candidates, decision.speedup, decision.row_lens) == ((), None, ())


def cliff(draft_ms: float = 0.9) -> CostTable:
    """A pass takes a leap behind 256 tokens."""
    tokens = (1, 256, 257, 2048)
    return CostTable(
        {
            k: CostCurve(
                tokens, tuple(8 + draft_ms * k + 0.012 * t + 14 * (t > 256) for t in tokens)
            )
            for k in LENS
        }
    )


def with_chunks(
    gate: Gate, rows: int, steps: int, every: int, chunk: int, run: int = 1, share: float = 0.7
) -> list[Decision]:
    """Run a gate at constant load with prompt chunks, where such a share of drafts is accepted."""
    random = np.random.default_rng(0)
    assert gate.costs is not None
    decisions = []
    for step in range(steps):
        now = load(rows, prefill=chunk if step % every < run else 0)
        decision = gate.decide(now)
        outcomes = [
            Outcome(i, 1, k, range(int((random.random(k) < share).cumprod().sum())))
            for i, k in enumerate(decision.row_lens)
            if k
        ]
        ms = gate.costs.step_ms(decision.draft_len, decision.tokens_in_pass, now.kv_tokens)
        gate.observe(decision, outcomes, now, None if now.prefill_tokens else ms)
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize("rows", [60, 120])
@pytest.mark.parametrize("pattern", [(3, 128, 1), (7, 300, 1), (40, 512, 6)])
@pytest.mark.parametrize("by_row", [False, True])
def test_prompt_chunks_alone_switch_nothing(
    rows: int, pattern: tuple[int, int, int], by_row: bool
) -> None:
    gate = Gate(LENS, cliff(), settings=GateSettings(by_row=by_row))
    with_chunks(gate, rows, 600, *pattern)
    before = gate.switches
    late = with_chunks(gate, rows, 300, *pattern)
    assert gate.switches == before
    assert len({d.draft_len for d in late if d.reason is not GateReason.PROBE}) == 1


def test_the_ceiling_is_held_in_the_very_pass_that_runs() -> None:
    """A step with a prompt chunk is cut short; the ones between draft as ever."""
    usual = with_chunks(Gate(LENS, costs()), 4, 200, 5, 100)[-1]
    gate = Gate(LENS, costs(), Policy(max_step_ms=usual.expected_ms + 5))
    decisions = with_chunks(gate, 4, 200, 5, 100)[100:]
    switches = gate.switches
    assert {d.draft_len for d in decisions[1::5]} == {usual.draft_len}
    for chunked in decisions[::5]:
        assert chunked.draft_len < usual.draft_len
        assert chunked.reason is GateReason.ITL_CEILING
    with_chunks(gate, 4, 100, 5, 100)
    assert gate.switches == switches


def test_few_rows_that_come_and_go_switch_little() -> None:
    """One to six of them, and answers so short that their ends keep drafts short."""
    random = np.random.default_rng(1)
    gate = Gate(LENS, costs(token_ms=1.0))
    rows: list[int] = []
    left: dict[int, int] = {}
    ids = iter(range(10_000))
    for _ in range(1500):
        if (len(rows) < 6 and random.random() < 0.25) or not rows:
            rows.append(next(ids))
            left[rows[-1]] = int(random.integers(4, 24))
        now = Load([RowLoad(row, left[row] - 1) for row in rows], 0, 10 * len(rows))
        decision = gate.decide(now)
        outcomes = []
        for row, drafted in zip(rows, decision.row_lens, strict=True):
            stood = int((random.random(drafted) < 0.8).cumprod().sum())
            outcomes.append(Outcome(row, 1, drafted, range(stood)))
            left[row] -= stood + 1
        ms = 10 + 0.5 * decision.draft_len + decision.tokens_in_pass
        gate.observe(decision, outcomes, now, ms)
        for row in [row for row in rows if left[row] <= 0]:
            rows.remove(row)
            gate.forget(row)
    assert gate.switches <= 1500 / 50


def switches(settings_: GateSettings) -> int:
    """Of a gate that has two draft lengths to choose from which bring the same."""
    gate = Gate(LENS, costs(draft_ms=1.45), settings=settings_)
    drive(gate, 0.7, 4, 600)
    return gate.switches


def test_a_small_gain_or_a_short_stay_does_not_switch() -> None:
    assert switches(GateSettings()) <= 4
    fickle = {
        "switch_gain": 0.0,
        "least_gain": 0.0,
        "dwell_steps": 0,
        "mean_steps": 1,
        "hold_steps": 1,
    }
    assert switches(GateSettings(**fickle)) > 20  # type: ignore[arg-type]


def test_what_has_become_much_too_long_is_cut_at_once() -> None:
    """With more rows, in the very next step, whatever the dwell."""
    for by_row in (False, True):
        settings_ = GateSettings(dwell_steps=10_000, by_row=by_row)
        gate = Gate(LENS, costs(token_ms=2.0), Policy(Mode.FIXED, draft_len=8), settings_)
        drive(gate, 0.95, 1, 50)
        gate.set_policy(Policy())
        assert gate.decide(load(1)).row_lens == (8,)
        decision = gate.decide(load(100))
        assert sum(decision.row_lens) <= 200
        if not by_row:
            assert decision.draft_len < 8
            assert decision.reason is not GateReason.DWELL


def test_while_off_it_probes_within_its_means_and_comes_back() -> None:
    gate = Gate(LENS, costs(draft_ms=2.0))
    off = drive(gate, 0.02, 16, 1000)
    probes = [d for d in off if d.reason is GateReason.PROBE]
    assert settled(off) == {0}
    assert probes
    for probe in probes:
        assert set(probe.row_reasons) == {GateReason.PROBE}
        assert max(probe.row_lens) == 1
    cost = [costs(draft_ms=2.0).step_ms(d.draft_len, d.tokens_in_pass) for d in off[200:]]
    plain = costs(draft_ms=2.0).step_ms(0, 16)
    assert sum(cost) / len(cost) < 1.01 * plain
    back = drive(gate, 0.95, 16, 1500, seed=1)
    assert settled(back) != {0}


def test_where_nothing_changes_it_probes_less_and_less() -> None:
    gate = Gate(LENS, costs(draft_ms=0.01, token_ms=3.0))
    off = drive(gate, 0.02, 16, 1500)
    at = [step for step, d in enumerate(off) if d.reason is GateReason.PROBE]
    gaps = np.diff(at)
    assert gaps[0] < 200
    assert gaps[-1] >= 256


def test_a_probe_stays_before_a_cliff_and_out_of_steps_with_prompts() -> None:
    gate = Gate(LENS, cliff())
    decisions = with_chunks(gate, 248, 1200, 3, 128, 1, share=0.02)
    probes = [step for step, d in enumerate(decisions) if d.reason is GateReason.PROBE]
    assert probes
    assert all(step % 3 for step in probes)
    assert all(decisions[step].tokens_in_pass <= 256 for step in probes)
    # Different rows each time.
    probed = {row for step in probes for row in np.flatnonzero(decisions[step].row_lens).tolist()}
    assert len(probed) >= 4


def test_drafts_go_where_there_is_room_for_them() -> None:
    """Up to the cliff in steps that are before it, for all rows in those that are beyond anyway."""
    late = with_chunks(Gate(LENS, cliff()), 248, 600, 3, 128, 1)[-30:]
    assert {d.tokens_in_pass for d in late[1::3] + late[2::3]} == {256}
    assert all(min(d.row_lens) > 0 for d in late[::3])
    assert len({d.draft_len for d in late}) == 1


def test_a_decision_is_kept_while_nothing_changes() -> None:
    gate = Gate(LENS, costs())
    drive(gate, 0.7, 4, 100)
    first = gate.decide(load(4))
    kept = 0
    while gate.decide(load(4)) is first:
        kept += 1
    assert 0 < kept <= gate.settings.hold_steps
    # Not with another row, less room, a prompt beside them, or another policy.
    for other in (load(5), load(4, caps=[1, None, None, None]), load(4, prefill=64)):
        before = gate.decide(load(4))
        assert gate.decide(other) is not before
    before = gate.decide(load(4))
    gate.set_policy(Policy(Mode.OFF))
    assert gate.decide(load(4)).row_lens == (0, 0, 0, 0)


def test_no_row_is_probed_that_may_not_draft() -> None:
    gate = Gate(LENS, costs(token_ms=50.0))
    for _ in range(400):
        decision = gate.decide(load(4, caps=[0, 0, None, 0]))
        assert decision.row_lens[:2] == (0, 0)
        gate.observe(decision, [], load(4), 60.0)


def test_a_wrong_table_is_put_right() -> None:
    """Verification is really three times as dear: it turns off, and not below no drafts."""
    table = costs(token_ms=0.4)
    truth = CostTable(
        {
            k: (c if k == 0 else CostCurve(c.tokens, tuple(3 * t for t in c.times_ms)))
            for k, c in table.curves.items()
        }
    )
    gate = Gate(LENS, table)
    late = drive(gate, 0.6, 16, 400, true_costs=truth)
    assert settled(late) == {0}
    assert gate.correction.factor(32, drafted=True) > 1.8


def test_a_decision_does_not_depend_on_what_it_has_drawn() -> None:
    """The same past and load give the same decision, and deciding changes no estimate."""
    gate = Gate(LENS, costs())
    drive(gate, 0.7, 4, 100)
    survival = gate.acceptance.survival(range(4))
    twin = copy.deepcopy(gate)
    assert gate.decide(load(4)) == twin.decide(load(4))
    assert np.array_equal(survival, gate.acceptance.survival(range(4)))


@settings(max_examples=80)
@given(st.data())
def test_whatever_comes_a_decision_is_within_the_limits(data: st.DataObject) -> None:
    gate = Gate(
        LENS,
        costs(
            token_ms=data.draw(st.sampled_from([0.01, 0.3, 5.0])),
            draft_ms=data.draw(st.sampled_from([0.0, 1.0, 9.0])),
        ),
        data.draw(
            st.sampled_from(
                [Policy(), Policy(max_step_ms=15.0), Policy(max_tpot_ms=5.0, max_draft_len=4)]
            )
        ),
    )
    for _ in range(data.draw(st.integers(1, 40))):
        rows = [
            RowLoad(row, data.draw(st.integers(0, 9)), data.draw(st.sampled_from([None, 0, 1, 3])))
            for row in data.draw(st.lists(st.integers(0, 20), max_size=5, unique=True))
        ]
        now = Load(rows, data.draw(st.integers(0, 200)), data.draw(st.integers(0, 9000)))
        decision = gate.decide(now)
        assert decision.draft_len in LENS
        assert decision.draft_len <= (gate.policy.max_draft_len or 8)
        assert decision.tokens_in_pass == now.plain_tokens + sum(decision.row_lens)
        for row, drafted in zip(rows, decision.row_lens, strict=True):
            assert 0 <= drafted <= min(decision.draft_len, row.left)
            assert row.cap is None or drafted <= row.cap
        assert len(decision.row_reasons) == len(rows)
        outcomes = [
            Outcome(row.row_id, 1, drafted, range(data.draw(st.integers(0, drafted))))
            for row, drafted in zip(rows, decision.row_lens, strict=True)
        ]
        gate.observe(decision, outcomes, now, data.draw(st.sampled_from([None, 1.0, 30.0, 5000.0])))
        if rows and data.draw(st.booleans()):
            gate.forget(rows[0].row_id)
