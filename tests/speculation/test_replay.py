"""A replay's world is what it is told to be, the same for every law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftgate.speculation import CostCurve, CostTable, Gate, GateSettings
from draftgate.speculation.crowd import Crowd, Drafts
from draftgate.speculation.laws import AutoLaw, Choice, FixedLaw, Law, TableLaw
from draftgate.speculation.load import Load
from draftgate.speculation.replay import Replay, replay
from draftgate.speculation.world import Kind, Phase, Requests, World

LENS = (0, 1, 3)


def costs(token_ms: float = 0.02, draft_ms: float = 0.5) -> CostTable:
    tokens = (1, 4096)
    curves = {
        k: CostCurve(tokens, tuple(8 + draft_ms * k + token_ms * t for t in tokens)) for k in LENS
    }
    return CostTable(curves)


def world(*phases: Phase, rates: tuple[float, ...] = (0.7, 0.6), **more: object) -> World:
    found = World(costs(), Requests([Kind(1.0, rates)], 64), phases or [Phase(8, 5.0)])
    return replace(found, **more)  # type: ignore[arg-type]


def run(law: Law, true: World, seed: int = 0) -> Replay:
    return replay(law, true, seed=seed)


def test_drafts_stand_as_often_as_they_should() -> None:
    crowd = Crowd(Requests([Kind(1.0, (0.8, 0.5, 0.25))], 10**9), 3, seed=1)
    crowd.begin(Phase(64, 1.0), 0.0)
    counts = np.zeros(4)
    for _ in range(400):
        accepted = crowd.accept(np.full(64, 3))
        counts += np.bincount(accepted, minlength=4)
        crowd.advance(accepted, 0.0)
    stood = counts[::-1].cumsum()[::-1] / counts.sum()
    assert stood[1:] == pytest.approx([0.8, 0.4, 0.1], abs=0.01)


def test_kinds_come_in_their_shares_and_their_mean_is_known() -> None:
    requests = Requests([Kind(1.0, (1.0,)), Kind(3.0, (0.0,))], 4)
    assert requests.survival(2) == [0.25, 0.25]
    assert requests.halved().survival(2) == [0.125, 0.125]
    crowd = Crowd(requests, 1, seed=0)
    crowd.begin(Phase(64, 1.0), 0.0)
    accepted = drafted = 0
    for _ in range(300):
        lens = np.minimum(crowd.rows().left, 1)
        stood = crowd.accept(lens)
        accepted, drafted = accepted + stood.sum(), drafted + lens.sum()
        crowd.advance(stood, 0.0)
    # Of the one kind a request drafts twice, of the other three times.
    assert accepted / drafted == pytest.approx(2 / 11, abs=0.02)


def test_requests_that_are_alike_have_the_survival_they_are_given() -> None:
    assert Requests.alike([0.6, 0.3, 0.0, 0.0]).survival(4) == pytest.approx([0.6, 0.3, 0, 0])


def test_a_request_emits_as_much_as_it_may_and_no_more() -> None:
    crowd = Crowd(Requests([Kind(1.0, (1.0,))], 10), 4, seed=0)
    crowd.begin(Phase(1, 1.0, context_tokens=100), 0.0)
    first = int(crowd.rows().left[0]) + 1
    lengths, left = [], 0
    for _ in range(40):
        rows = crowd.rows()
        assert len(rows) == 1
        assert rows[0].left == rows.left[0]
        stood = crowd.accept(np.minimum(rows.left, 4))
        left += int(stood[0]) + 1
        if crowd.advance(stood, 0.0) == [rows[0].row_id]:
            lengths.append(left)
            left = 0
    assert lengths[0] == first
    assert set(lengths[1:]) == {10}
    assert 100 <= crowd.kv_tokens < 110


def test_rows_pause_and_come_back() -> None:
    crowd = Crowd(Requests([Kind(1.0, (0.0,))], 2), 1, seed=0)
    crowd.begin(Phase(4, 1.0, pause_s=1.0), 0.0)
    time_s, seen = 0.0, set()
    for _ in range(200):
        count = len(crowd.rows())
        assert count
        seen.add(count)
        crowd.advance(np.zeros(count, dtype=np.int64), time_s)
        time_s = crowd.wait(time_s + 0.1)
    assert len(seen) > 1
    assert max(seen) <= 4


def test_where_no_row_may_draft_a_step_is_a_plain_one() -> None:
    true = world(Phase(4, 1.0))
    lone_tokens = replace(true, requests=Requests([Kind(1.0, (0.7, 0.6))], 1))
    drafting, plain = (run(FixedLaw(k), lone_tokens).phases[0] for k in (3, 0))
    assert drafting.ends_s == plain.ends_s


def test_laws_meet_the_same_text() -> None:
    """Whether a draft stands somewhere in a text does not depend on how long drafts are."""
    ran = {}
    for draft_len in (1, 3):
        crowd = Crowd(Requests([Kind(1.0, (0.5, 0.5, 0.5))], 10**6), 3, seed=3)
        crowd.begin(Phase(4, 1.0), 0.0)
        stands = [dict[int, bool]() for _ in range(4)]
        at = np.zeros(4, dtype=int)
        for _ in range(200):
            stood = crowd.accept(np.full(4, draft_len))
            for row in range(4):
                for place in range(min(int(stood[row]) + 1, draft_len)):
                    stands[row][at[row] + place] = place < stood[row]
            at += stood + 1
            crowd.advance(stood, 0.0)
        ran[draft_len] = stands
    for short, long in zip(ran[1], ran[3], strict=True):
        both = short.keys() & long.keys()
        assert len(both) > 50
        assert all(short[place] == long[place] for place in both)


def test_times_and_tokens_are_those_of_the_table() -> None:
    true = world(Phase(8, 1.0, prefill_every=2, prefill_tokens=100), rates=(1.0,))
    true = replace(true, requests=replace(true.requests, output_tokens=10**6))
    [phase] = run(FixedLaw(1), true).phases
    assert phase.emitted == [16] * phase.steps
    plain = costs().step_ms(1, 16)
    steps = np.diff([0.0, *phase.ends_s]) * 1e3
    assert steps == pytest.approx([plain + 2.0 if i % 2 == 0 else plain for i in range(len(steps))])
    assert 1.0 <= phase.seconds < 1.02
    assert phase.tokens_per_s == pytest.approx(16 * phase.steps / phase.seconds)
    tokens, seconds = phase.since(phase.ends_s[9])
    assert tokens == 16 * (phase.steps - 10)
    assert seconds == pytest.approx(phase.ends_s[-1] - phase.ends_s[9])
    assert phase.since(0.0) == (phase.tokens, pytest.approx(phase.seconds))


def test_the_truth_may_be_dearer_than_the_table() -> None:
    true = world(cost_factor=lambda tokens: 2.0 if tokens > 8 else 1.0)
    assert run(FixedLaw(0), true).steps == run(FixedLaw(0), world()).steps
    assert run(FixedLaw(1), true).steps == pytest.approx(run(FixedLaw(1), world()).steps / 2, abs=1)


def test_acceptance_may_change_half_way() -> None:
    true = world(Phase(32, 4.0), Phase(32, 4.0), rates=(0.9,))
    first, second = run(FixedLaw(1), replace(true, requests_later=true.requests.halved())).phases
    assert first.tokens / first.steps / 32 == pytest.approx(1.9, abs=0.03)
    assert second.tokens / second.steps / 32 == pytest.approx(1.45, abs=0.03)


class Alternating(FixedLaw):
    """Another draft length at each step."""

    def decide(self, load: Load) -> Choice:
        self._fixed = 1 - self._fixed
        return super().decide(load)


def test_switches_are_counted() -> None:
    true = world(Phase(8, 2.0), Phase(8, 2.0))
    found = run(Alternating(0), true)
    assert found.switches == found.steps - 1
    assert run(FixedLaw(1), true).switches == 0


def test_jitter_changes_times_and_not_their_mean() -> None:
    still, shaken = run(FixedLaw(0), world()), run(FixedLaw(0), world(jitter=0.1))
    assert shaken.steps == pytest.approx(still.steps, rel=0.03)
    assert len({round(t, 6) for t in np.diff(shaken.phases[0].ends_s)}) > 100


def test_rows_that_leave_are_forgotten() -> None:
    gate = Gate(LENS, costs())
    run(AutoLaw(gate), world(Phase(30, 2.0), Phase(3, 2.0)))
    assert gate.acceptance.row_count <= 3


def test_a_probe_drafts_with_some_rows_alone() -> None:
    """And what nobody drafts is not observed as a draft."""
    seen: list[Drafts] = []

    class Seen(AutoLaw):
        def observe(self, drafts: Drafts, load: Load, measured_ms: float) -> None:
            seen.append(drafts)
            super().observe(drafts, load, measured_ms)

    run(Seen(Gate(LENS, costs(token_ms=1.0))), world(Phase(32, 10.0), rates=(0.2,)))
    partial = [d for d in seen if 0 < np.count_nonzero(d.drafted) < 32]
    assert partial
    assert all(len(d.outcomes()) == np.count_nonzero(d.drafted) for d in seen)


MIXED = Requests([Kind(1.0, (0.9, 0.85, 0.8)), Kind(1.0, (0.3, 0.2, 0.2))], 200)


def steep(true: World, token_ms: float = 0.08) -> World:
    """Where verified tokens cost."""
    return replace(true, costs=costs(token_ms), requests=MIXED, jitter=0.02)


def speeds(true: World, laws: dict[str, Law], settled_s: float) -> dict[str, float]:
    found = {}
    for name, law in laws.items():
        [phase] = run(law, true).phases
        tokens, seconds = phase.since(settled_s)
        found[name] = tokens / seconds
    return found


@pytest.mark.parametrize("rows", [1, 8, 60, 200])
def test_the_gate_is_about_the_best_fixed_draft_length(rows: int) -> None:
    true = steep(world(Phase(rows, 12.0, prefill_every=7)))
    laws: dict[str, Law] = {f"fixed:{k}": FixedLaw(k) for k in LENS}
    laws["auto"] = AutoLaw(Gate(LENS, true.costs))
    found = speeds(true, laws, 4.0)
    auto = found.pop("auto")
    assert auto > 0.98 * max(found.values()), (auto, found)


@pytest.mark.parametrize("rows", [24, 60, 200])
def test_with_a_wrong_profile_it_is_no_slower_than_no_drafts(rows: int) -> None:
    true = steep(world(Phase(rows, 16.0), cost_factor=lambda tokens: 1.6 if tokens > 64 else 1.0))
    laws: dict[str, Law] = {"off": FixedLaw(0), "auto": AutoLaw(Gate(LENS, true.costs))}
    found = speeds(true, laws, 6.0)
    assert found["auto"] > 0.98 * found["off"]
    # The same law without that correction is a table, and falls behind.
    best = {24: 3, 60: 3, 200: 1}[rows]
    tabled = speeds(true, {"table": TableLaw({1: best})}, 6.0)["table"]
    assert found["auto"] > 1.02 * tabled


def test_drafts_by_row_gain_where_verified_tokens_cost_and_requests_differ() -> None:
    true = steep(world(Phase(60, 16.0)), token_ms=0.2)
    laws: dict[str, Law] = {
        str(by_row): AutoLaw(Gate(LENS, true.costs, settings=GateSettings(by_row=by_row)))
        for by_row in (True, False)
    }
    found = speeds(true, laws, 5.0)
    assert found["True"] > 1.03 * found["False"], found


def test_requests_that_are_alike_lose_nothing_by_drafts_by_row() -> None:
    true = replace(steep(world(Phase(60, 12.0))), requests=Requests([Kind(1.0, (0.6, 0.5))], 200))
    laws: dict[str, Law] = {
        str(by_row): AutoLaw(Gate(LENS, true.costs, settings=GateSettings(by_row=by_row)))
        for by_row in (True, False)
    }
    found = speeds(true, laws, 4.0)
    assert found["True"] > 0.99 * found["False"], found
