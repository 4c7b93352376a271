"""The load gate in the step loop: it changes how much is drafted, by load, and never a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from draftgate.contract import GateReason
from draftgate.engine import Output, Target
from draftgate.engine.drafters import (
    Draft,
)
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from draftgate.speculation import CostCurve, CostTable, Mode, Policy
from tests.support.eagle import write_drafter
from tests.support.engine import (
    Running,
    ScriptedDrafter,
    Stream,
    greedy,
    running,
    use_drafter,
)
from tests.support.speculation import (
    PROMPTS,
    SETTINGS,
    VARIED,
    PacedDrafter,
    alone,
    model_drafter,
    oracle,
    sometimes_right,
    unsteady,
)
from tests.support.tiny_models import BLOCK_BYTES, TINY


def costs(
    free_tokens: int, lens: Sequence[int] = (0, 1, 2, 4, 6), token_ms: float = 1.0
) -> CostTable:
    """So many tokens cost a pass of 10 ms, each more `token_ms`; a draft step 0.1 ms."""
    points, dear_ms = (1, free_tokens, free_tokens + 1000), 1000 * token_ms
    return CostTable(
        {k: CostCurve(points, tuple(10 + 0.1 * k + t for t in (0, 0, dear_ms))) for k in lens}
    )


def still() -> float:
    """A clock by which no step takes any time: what a gate expects of steps then stays as it is."""
    return 0.0


def flip(engine: Running) -> None:
    """Have every step draft where the one before did not, up to six tokens."""
    drafts = engine.engine.gate.policy.mode is Mode.OFF
    policy = Policy(mode=Mode.FIXED, draft_len=6) if drafts else Policy(mode=Mode.OFF)
    engine.engine.set_policy(policy)


def run_flipping(
    engine: Running, prompts: Mapping[str, Sequence[int]], params: SamplingParams
) -> dict[str, list[int]]:
    """All prompts at once while the policy changes after each step."""
    seen: list[int] = []

    def after(stream: Stream, output: Output) -> None:
        steps = engine.engine.counters().steps
        if steps not in seen[-1:]:
            seen.append(steps)
            flip(engine)

    streams = {
        name: engine.submit(name, ids, params, on_output=after) for name, ids in prompts.items()
    }
    return {name: stream.wait().tokens for name, stream in streams.items()}


@pytest.mark.parametrize("how", ["on", "off", "flipping"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_gate_changes_no_token(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, how: str
) -> None:
    """Whatever it decides, with rows that join, leave and are put back."""
    params = SETTINGS[setting]
    expected = alone(tiny, params)
    folder = write_drafter(tmp_path / "drafter", TINY, draft_vocab=40)
    lens: set[int] = set()
    for seed in range(3):
        random = np.random.default_rng(seed)
        answer = sometimes_right(oracle(expected), seed)
        drafter = PacedDrafter(
            model_drafter("hybrid", folder, tiny), lambda query: query.count, answer
        )
        use_drafter(monkeypatch, drafter)
        with running(
            tiny,
            clock=still,
            draft_len=6,
            max_batch_rows=int(random.integers(2, 7)),
            prefill_chunk_tokens=int(random.integers(1, 60)),
            kv_cache_bytes=int(random.integers(12, 30)) * BLOCK_BYTES,
            started=False,
        ) as engine:
            engine.engine.use_costs(costs(free_tokens=8))
            if how != "on":
                engine.engine.set_policy(Policy(mode=Mode.OFF))
            engine.engine.start()
            if how == "flipping":
                tokens = run_flipping(engine, PROMPTS, params)
            else:
                tokens = engine.run(PROMPTS, params)
            assert tokens == expected
            counters = engine.engine.counters()
            lens |= {step.draft_len for step in engine.engine.steps_since(0, 1 << 12).steps}
        assert (counters.drafted_tokens > 0) == (how != "off")
    wanted = {"on": 3, "off": 1, "flipping": 2}
    assert len(lens) >= wanted[how], "the gate never changed its mind"


@pytest.mark.parametrize("how", ["on", "flipping"])
def test_real_text_under_the_gate(
    target: Target,
    any_drafter: Path,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """The packaged model: joins and leaves move the load, and K with it."""
    chosen = {name: prompts[name] for name in sorted(prompts)[3::8]}
    answer = sometimes_right(oracle(together, chosen), seed=1, share=0.6)
    drafter = PacedDrafter(
        model_drafter("hybrid", any_drafter, target), lambda query: query.count, answer
    )
    use_drafter(monkeypatch, drafter)
    with running(target, clock=still, draft_len=6, max_batch_rows=4, started=False) as engine:
        engine.engine.use_costs(costs(free_tokens=9))
        engine.engine.start()
        run = run_flipping if how == "flipping" else Running.run
        assert run(engine, chosen, greedy(64)) == {name: together[name] for name in chosen}
        gate, counters = engine.engine.gate, engine.engine.counters()
    assert gate.switches > (20 if how == "flipping" else 0)
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def test_more_rows_are_drafted_less_for(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes are free up to eight tokens: six for one row, hardly any for each of twelve."""
    expected = alone(tiny, greedy(40))
    following = oracle(expected)
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft(tuple(following(query)))))
    drafted: dict[int, Counter[int]] = {}

    def note(stream: Stream, output: Output) -> None:
        step = output.verify_step
        if output.gate_reason in (GateReason.GAIN, GateReason.COMPUTE_BOUND):
            count = len(step.draft_ids) if step is not None else 0
            drafted.setdefault(output.batch_rows, Counter())[count] += 1

    with running(tiny, clock=still, draft_len=6, started=False) as engine:
        engine.engine.use_costs(costs(free_tokens=8, token_ms=3.0))
        streams = [
            engine.submit(f"{copy} {name}", ids, greedy(40), on_output=note)
            for copy in range(2)
            for name, ids in PROMPTS.items()
        ]
        engine.engine.start()
        for stream in streams:
            stream.wait()
        engine.submit("alone", PROMPTS["1"], greedy(40), on_output=note).wait()
    assert drafted[1].most_common(1)[0][0] == 6
    # While prompts are still to be read, few of the rows decode.
    assert drafted[12].most_common(1)[0][0] < 6


def test_acceptance_is_learned_while_nothing_is_drafted(tiny: Target) -> None:
    """By looking up what prompt lookup would have drafted; what is not verified is not counted."""
    with running(tiny, clock=still, drafter="ngram", ngram_min=1, started=False) as engine:
        engine.engine.use_costs(costs(free_tokens=8))
        engine.engine.set_policy(Policy(mode=Mode.OFF))
        engine.engine.start()
        # Plain greedy text of a tiny model soon repeats itself.
        stream = engine.one(PROMPTS["2"], greedy(200))
        rates = engine.engine.gate.acceptance.seen()
        assert engine.engine.counters().drafted_tokens == stream.drafted == 0
    (source,) = rates
    guesses = [(tokens, token) for tokens, token in _guesses(PROMPTS["2"], stream.tokens) if tokens]
    right = sum(token == guess for guess, token in guesses) / len(guesses)
    assert abs(float(rates[source][0]) - right) < 0.15


def _guesses(prompt: Sequence[int], tokens: Sequence[int]) -> list[tuple[int | None, int]]:
    """What prompt lookup guesses before each token after the first, and the token."""
    found: list[tuple[int | None, int]] = []
    whole = [*prompt, *tokens]
    for end in range(len(prompt) + 1, len(whole)):
        guess = None
        for size in range(min(6, end), 0, -1):
            starts = [
                i for i in range(end - size) if whole[i : i + size] == whole[end - size : end]
            ]
            if starts:
                guess = whole[starts[-1] + size]
                break
        found.append((guess, whole[end]))
    return found


def test_an_operators_policy_holds_from_the_next_step_on(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(tiny, VARIED)
    following = oracle(expected)
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft(tuple(following(query)))))
    orders = {
        2: (Policy(max_step_ms=10.25), GateReason.ITL_CEILING, 2),
        5: (Policy(mode=Mode.OFF), GateReason.OPERATOR, 0),
        8: (Policy(mode=Mode.FIXED, draft_len=2), GateReason.OPERATOR, 2),
        11: (Policy(max_draft_len=1), GateReason.GAIN, 1),
    }

    def order(stream: Stream, output: Output) -> None:
        if output.chunk_index in orders:
            engine.engine.set_policy(orders[output.chunk_index][0])

    with running(tiny, clock=still, draft_len=4, started=False) as engine:
        engine.engine.use_costs(costs(free_tokens=8))
        engine.engine.start()
        stream = engine.submit("one", PROMPTS["2"], VARIED, on_output=order).wait()
    assert stream.tokens == expected["2"]
    for index, (_, reason, count) in orders.items():
        for output in stream.outputs[index + 1 : index + 3]:
            step = output.verify_step
            assert output.gate_reason is reason, index
            assert (len(step.draft_ids) if step is not None else 0) == count, index


def test_a_policy_out_of_range_changes_nothing(tiny: Target) -> None:
    with running(tiny, draft_len=4) as engine:
        engine.engine.set_policy(Policy(mode=Mode.FIXED, draft_len=3))
        for wrong, words in (
            (Policy(mode=Mode.FIXED, draft_len=5), "draft_len: got 5, allowed: an integer 0 to 4"),
            (Policy(max_step_ms=0.0), "max_step_ms: got 0.0, allowed: a time above 0"),
        ):
            with pytest.raises(DraftgateError) as caught:
                engine.engine.set_policy(wrong)
            assert caught.value.code is ErrorCode.INVALID_ARGUMENT
            assert words in str(caught.value)
        assert engine.engine.gate.policy == Policy(mode=Mode.FIXED, draft_len=3)


def test_rows_that_left_are_forgotten(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they left: what is known of rows does not grow with the requests served."""
    use_drafter(monkeypatch, unsteady(oracle(alone(tiny, greedy(40))), seed=3))
    with running(tiny, draft_len=4, max_batch_rows=3, kv_cache_bytes=12 * BLOCK_BYTES) as engine:
        for _ in range(3):
            engine.run(PROMPTS, greedy(40))
        assert engine.engine.counters().preemptions > 0
        assert engine.engine.gate.acceptance.row_count == 0
