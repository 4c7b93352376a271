"""Requests come, wait, run, are stopped, expire and fail: through the public engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftgate.contract import FinishReason, GateReason
from draftgate.engine import (
    Engine,
    EngineConfig,
    EngineCounters,
    Output,
    Request,
    Target,
    load_target,
)
from draftgate.engine.drafters import Draft, DraftQuery
from draftgate.errors import DraftgateError, ErrorCode
from tests.support.engine import ScriptedDrafter, Stream, greedy, running, sampled, use_drafter
from tests.support.tiny_models import BLOCK_BYTES, TINY, write_checkpoint

PROMPT = (3, 14, 15, 92, 65, 35)
LONG = tuple((7 * i * i + 3 * i) % 96 for i in range(2000))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def at_output(index: int, action: Callable[[], Any]) -> Callable[[Stream, Output], None]:
    """Run `action` on the engine's thread, between two steps, after a stream's output."""

    def hook(stream: Stream, output: Output) -> None:
        if output.chunk_index == index:
            action()

    return hook


# Batches


def test_a_long_prompt_holds_nobody_up_for_more_than_a_chunk(tiny: Target) -> None:
    """A decoding row emits on every step while 2,000 tokens are taken in, at most 128 at a time
    and not for ever."""
    with running(tiny, prefill_chunk_tokens=128, drafter="none") as engine:
        long: list[Stream] = []
        steps: list[int] = []
        rows: list[int] = []

        def hook(stream: Stream, output: Output) -> None:
            steps.append(engine.engine.counters().steps)
            rows.append(output.batch_rows)
            if output.chunk_index == 3:
                long.append(engine.submit("long", LONG, greedy(1), on_output=note))

        arrived: list[int] = []

        def note(stream: Stream, output: Output) -> None:
            arrived.append(engine.engine.counters().steps)

        short = engine.submit("short", PROMPT, greedy(80), on_output=hook)
        short.wait()
        long[0].wait()
    assert np.diff(steps).tolist() == [1] * 79
    taken = arrived[0] - steps[3]
    assert math.ceil(2000 / 128) <= taken <= 60
    assert rows == [1] * 4 + [2] * taken + [1] * (76 - taken)


def test_prompts_of_every_length_around_the_chunk(tiny: Target) -> None:
    for length in (1, 7, 8, 9, 16, 17):
        with running(tiny, prefill_chunk_tokens=8, drafter="none") as engine:
            stream = engine.one(LONG[:length], greedy(3))
            assert engine.engine.counters().steps == math.ceil(length / 8) + 2
        assert stream.outputs[0].prompt_len == length
        assert stream.tokens[0] == int(tiny.score(LONG[:length])[-1].argmax())


def test_times_are_told(tiny: Target) -> None:
    clock = Clock()
    with running(tiny, clock=clock, max_batch_rows=1, prefill_chunk_tokens=8) as engine:
        second: list[Stream] = []

        def hook(stream: Stream, output: Output) -> None:
            if output.chunk_index == 0:
                second.append(engine.submit("second", LONG[:32], greedy(2)))
            clock.now_s += 0.25

        engine.submit("first", PROMPT, greedy(4), on_output=hook).wait()
        second[0].wait()
    # It arrived before the clock moved, and waited for the first one's four outputs.
    assert second[0].outputs[0].queue_us == 1_000_000
    assert second[0].outputs[0].prefill_us == 0


# Refusals


BAD: dict[str, tuple[str, Request]] = {
    "no tokens": ("input_ids", Request("x", (), greedy(4))),
    "too long": ("input_ids", Request("x", LONG * 3, greedy(4))),
    "exactly too long": ("input_ids", Request("x", (1,) * 4096, greedy(4))),
    "beyond the vocabulary": ("input_ids[2]", Request("x", (1, 2, 96), greedy(4))),
    "negative id": ("input_ids[0]", Request("x", (-1,), greedy(4))),
    "resumes everything": ("resume_len", Request("x", PROMPT, greedy(9), resume_len=6)),
    "resumes less than nothing": ("resume_len", Request("x", PROMPT, greedy(9), resume_len=-1)),
    "nothing left": ("max_tokens", Request("x", PROMPT, greedy(2), resume_len=2)),
    "no deadline left": ("deadline_ms", Request("x", PROMPT, greedy(2), deadline_ms=0)),
    "max_tokens": ("max_tokens", Request("x", PROMPT, greedy(0))),
    "temperature": ("temperature", Request("x", PROMPT, sampled(2, temperature=math.nan))),
    "top_p": ("top_p", Request("x", PROMPT, sampled(2, top_p=0.0))),
    "top_k": ("top_k", Request("x", PROMPT, sampled(2, top_k=-1))),
    "min_p": ("min_p", Request("x", PROMPT, sampled(2, min_p=1.5))),
    "repetition": ("repetition_penalty", Request("x", PROMPT, greedy(2, repetition_penalty=0.0))),
    "presence": ("presence_penalty", Request("x", PROMPT, greedy(2, presence_penalty=math.inf))),
    "frequency": ("frequency_penalty", Request("x", PROMPT, greedy(2, frequency_penalty=-3.0))),
    "seed": ("seed", Request("x", PROMPT, sampled(2, seed=2**64))),
    "logprobs": ("logprobs", Request("x", PROMPT, greedy(2, logprobs=21))),
    "draft length": ("max_draft_len", Request("x", PROMPT, greedy(2, max_draft_len=-1))),
    "stop id": ("stop_token_ids[1]", Request("x", PROMPT, greedy(2, stop_token_ids=(1, 96)))),
    "many stops": ("stop_token_ids", Request("x", PROMPT, greedy(2, stop_token_ids=(1,) * 65))),
}


def test_bad_requests_name_their_field_and_leave_nothing_behind(tiny: Target) -> None:
    with running(tiny) as engine:
        for field, request in BAD.values():
            stream = Stream(request)
            with pytest.raises(DraftgateError) as caught:
                engine.engine.submit(request, stream)
            assert caught.value.code is ErrorCode.INVALID_ARGUMENT
            assert caught.value.field == field
            assert not stream.outputs
        assert engine.engine.counters() == EngineCounters(
            kv_total_blocks=engine.engine.counters().kv_total_blocks
        )
        assert len(engine.one(PROMPT, greedy(3)).tokens) == 3


def test_the_longest_prompt_that_is_taken_gets_one_token(tiny: Target) -> None:
    with running(tiny, max_sequence_tokens=64) as engine:
        assert engine.engine.max_sequence_tokens == 64
        stream = engine.one(LONG[:63], greedy(10))
        with pytest.raises(DraftgateError, match="at most 63 tokens"):
            engine.submit("longer", LONG[:64], greedy(10))
    assert len(stream.tokens) == 1
    assert stream.finish_reason is FinishReason.LENGTH


def test_a_small_budget_limits_the_sequence_not_the_server(tiny: Target) -> None:
    with running(tiny, kv_cache_bytes=10 * BLOCK_BYTES, max_batch_rows=4) as engine:
        assert engine.engine.kv_block_bytes == BLOCK_BYTES
        assert engine.engine.max_sequence_tokens == 160
        stream = engine.one(LONG[:100], greedy(1000))
    assert len(stream.tokens) == 60
    assert stream.finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses_and_the_rest_runs_on(tiny: Target) -> None:
    with running(tiny, max_batch_rows=1, max_waiting=2) as engine:
        more: list[Stream] = []
        refused: list[DraftgateError] = []

        def fill() -> None:
            more.extend(engine.submit(f"more {i}", PROMPT, greedy(2)) for i in range(2))
            with pytest.raises(DraftgateError) as caught:
                engine.submit("too many", PROMPT, greedy(2))
            refused.append(caught.value)

        first = engine.submit("first", PROMPT, greedy(6), on_output=at_output(2, fill)).wait()
        assert refused[0].code is ErrorCode.RESOURCE_EXHAUSTED
        assert first.tokens[:2] == more[0].wait().tokens == more[1].wait().tokens
        # What was refused is not known: its id is free.
        assert engine.submit("too many", PROMPT, greedy(1)).wait().tokens == first.tokens[:1]


def test_an_id_that_is_running_or_waiting_is_refused(tiny: Target) -> None:
    with running(tiny, max_batch_rows=1, started=False) as engine:
        refused: list[DraftgateError] = []

        def again() -> None:
            for name in ("first", "second"):
                with pytest.raises(DraftgateError) as caught:
                    engine.submit(name, PROMPT, greedy(2))
                refused.append(caught.value)

        hook = at_output(2, again)
        first = engine.submit("first", PROMPT, greedy(6), on_output=hook)
        second = engine.submit("second", PROMPT, greedy(2))
        engine.engine.start()
        assert len(first.wait().tokens) == 6
        assert len(second.wait().tokens) == 2
    assert [error.code for error in refused] == [ErrorCode.ALREADY_EXISTS] * 2
    assert {error.field for error in refused} == {"request_id"}


def test_an_id_is_free_again_once_its_last_output_is_there(tiny: Target) -> None:
    with running(tiny) as engine:
        streams: list[Stream] = []

        def hook(stream: Stream, output: Output) -> None:
            if output.finish_reason is not FinishReason.NONE and len(streams) < 20:
                streams.append(engine.submit("again", PROMPT, greedy(2), on_output=hook))

        streams.append(engine.submit("again", PROMPT, greedy(2), on_output=hook))
        while len(streams) < 20 or not streams[-1].ended:
            streams[-1].wait()
        assert len({tuple(stream.wait().tokens) for stream in streams}) == 1


# Stops


def test_a_stop_that_overtakes_its_request_ends_it(tiny: Target) -> None:
    with running(tiny) as engine:
        engine.engine.stop("late")
        stream = engine.submit("late", PROMPT, greedy(50)).wait()
        assert stream.tokens == []
        assert stream.finish_reason is FinishReason.CANCELLED
        # Once: the next one of this name runs.
        assert len(engine.submit("late", PROMPT, greedy(5)).wait().tokens) == 5


def test_a_stop_that_comes_after_the_end_stops_nobody(tiny: Target) -> None:
    """A caller that ends a stream as it closes must not lose its next request of that name."""
    with running(tiny) as engine:
        engine.submit("name", PROMPT, greedy(3)).wait()
        engine.engine.stop("name")
        assert len(engine.submit("name", PROMPT, greedy(3)).wait().tokens) == 3


def test_a_stop_does_not_wait_for_ever(tiny: Target) -> None:
    """What it overtook would have come at once; much later the id is somebody else's."""
    clock = Clock()
    with running(tiny, clock=clock) as engine:
        engine.engine.stop("soon")
        engine.engine.stop("late")
        clock.now_s += 9.0
        assert engine.submit("soon", PROMPT, greedy(3)).wait().tokens == []
        clock.now_s += 2.0
        assert len(engine.submit("late", PROMPT, greedy(3)).wait().tokens) == 3


def test_a_stop_of_a_refused_request_is_not_for_its_next_try(tiny: Target) -> None:
    with running(tiny) as engine:
        with pytest.raises(DraftgateError):
            engine.submit("again", PROMPT, greedy(0))
        engine.engine.stop("again")
        assert len(engine.submit("again", PROMPT, greedy(3)).wait().tokens) == 3


def test_stops_of_requests_that_never_come_take_no_memory(tiny: Target) -> None:
    with running(tiny) as engine:
        for index in range(10_000):
            engine.engine.stop(f"never {index}")
        engine.engine.stop("late")
        assert engine.submit("late", PROMPT, greedy(9)).wait().tokens == []
        assert len(engine.submit("never 1", PROMPT, greedy(2)).wait().tokens) == 2


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_a_stop_frees_the_row_within_two_steps(tiny: Target, when: str) -> None:
    """Another row's outputs are the clock: one each step."""
    rows = 1 if when == "waiting" else 2
    prompt = PROMPT if when == "decode" else LONG
    with running(tiny, max_batch_rows=rows, prefill_chunk_tokens=32, drafter="none") as engine:
        victim: list[Stream] = []
        seen: list[EngineCounters] = []

        def hook(stream: Stream, output: Output) -> None:
            if output.chunk_index == 2:
                victim.append(engine.submit("victim", prompt, greedy(500)))
            if output.chunk_index == 8:
                seen.append(engine.engine.counters())
                assert bool(victim[0].outputs) == (when == "decode")
                assert not victim[0].ended
                engine.engine.stop("victim")
            if output.chunk_index == 10:
                seen.append(engine.engine.counters())
                assert victim[0].ended

        other = engine.submit("other", PROMPT, greedy(14), on_output=hook).wait()
        victim[0].wait()
    before, after = seen
    assert (before.running_rows, before.waiting_rows) == (rows, 2 - rows)
    assert (after.running_rows, after.waiting_rows) == (1, 0)
    assert after.kv_used_blocks == 1  # 17 tokens, the last not computed yet
    assert after.rows_freed_cancelled == (when != "waiting")
    assert victim[0].finish_reason is FinishReason.CANCELLED
    assert len(other.tokens) == 14


def test_stopping_rows_leaves_the_others_as_they_are(tiny: Target) -> None:
    """Rows leave from the first, a middle and the last slot, and the gaps close."""
    with running(tiny, drafter="none") as engine:
        wanted = {f"{i}": engine.one(LONG[i : i + 9 + i], greedy(30)).tokens for i in range(8)}
    with running(tiny, drafter="none", started=False) as engine:
        streams: dict[str, Stream] = {}

        def hook(stream: Stream, output: Output) -> None:
            for at, name in ((4, "1"), (6, "4"), (8, "7"), (8, "2")):
                if output.chunk_index == at:
                    engine.engine.stop(name)

        for i in range(8):
            streams[f"{i}"] = engine.submit(
                f"{i}", LONG[i : i + 9 + i], greedy(30), on_output=hook if i == 0 else None
            )
        engine.engine.start()
        for name, stream in streams.items():
            tokens = stream.wait().tokens
            assert tokens == wanted[name][: len(tokens)]
            assert (len(tokens) < 30) == (name in "1472")
        assert engine.engine.counters().rows_freed_cancelled == 4


# Deadlines


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(tiny: Target) -> None:
    clock = Clock()
    with running(tiny, clock=clock, max_batch_rows=2, drafter="none") as engine:
        streams: dict[str, Stream] = {}

        def hook(stream: Stream, output: Output) -> None:
            if output.chunk_index == 0:
                for name in ("runs", "waits"):
                    params = greedy(500)
                    streams[name] = engine.submit(name, PROMPT, params, deadline_ms=2000)
            clock.now_s += 0.25
            if output.chunk_index == 7:
                assert not streams["runs"].ended
            if output.chunk_index == 9:
                assert all(stream.ended for stream in streams.values())

        engine.submit("other", PROMPT, greedy(12), on_output=hook).wait()
        assert streams["waits"].wait().tokens == []
        assert 5 <= len(streams["runs"].wait().tokens) <= 8
        assert {s.finish_reason for s in streams.values()} == {FinishReason.DEADLINE}
        counters = engine.engine.counters()
        assert (counters.running_rows, counters.rows_freed_cancelled) == (0, 0)


# The end


def test_closing_ends_everything_as_cancelled(tiny: Target) -> None:
    with running(tiny, max_batch_rows=2) as engine:
        reached = threading.Event()
        hook = at_output(3, reached.set)
        streams = [
            engine.submit(f"{i}", PROMPT, greedy(4000), on_output=hook if i == 0 else None)
            for i in range(5)
        ]
        assert reached.wait(60)
        engine.engine.close()
        for stream in streams:
            assert stream.wait().finish_reason is FinishReason.CANCELLED
            assert stream.outputs[-1].error is None
        with pytest.raises(DraftgateError) as caught:
            engine.submit("after", PROMPT, greedy(2))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        engine.engine.close()  # again is as good as once


def test_closing_an_engine_that_never_started_ends_what_it_was_given(tiny: Target) -> None:
    engine = Engine(tiny, EngineConfig(kv_cache_bytes=1 << 24))
    stream = Stream(Request("early", PROMPT, greedy(4)))
    engine.submit(stream.request, stream)
    engine.close()
    assert stream.wait().finish_reason is FinishReason.CANCELLED


class _Broken(ScriptedDrafter):
    """Works for a while."""

    def propose(self, queries: Any) -> list[Draft]:
        if any(len(query.tokens) > len(PROMPT) + 5 for query in queries):
            raise RuntimeError("drafter out of order")
        return super().propose(queries)


def test_a_failing_step_is_told_to_everyone_and_ends_the_engine(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_drafter(monkeypatch, _Broken(lambda query: Draft()))
    with running(tiny, max_batch_rows=2, started=False) as engine:
        streams = [engine.submit(f"{i}", PROMPT, greedy(50)) for i in range(4)]
        failures: list[str] = []
        failed = threading.Event()

        def on_failure(why: str) -> None:
            assert all(stream.ended for stream in streams)
            failures.append(why)
            failed.set()

        engine.engine.start(on_failure)
        for stream in streams:
            stream.wait()
            error = stream.outputs[-1].error
            assert error is not None
            assert error.code is ErrorCode.UNAVAILABLE
            assert "drafter out of order" in error.message
            assert stream.finish_reason is FinishReason.CANCELLED
        assert [len(stream.tokens) for stream in streams] == [6, 6, 0, 0]
        assert failed.wait(60)
        assert failures == ["the engine failed: drafter out of order"]
        refusals = []
        for _ in range(2):
            with pytest.raises(DraftgateError, match="drafter out of order") as caught:
                engine.submit("after", PROMPT, greedy(2))
            assert caught.value.code is ErrorCode.UNAVAILABLE
            refusals.append(caught.value)
        # One object raised again and again would gather the frames of all who caught it.
        assert refusals[0] is not refusals[1]


def test_a_drafter_that_lags_behind_is_asked_and_may_decline(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up is the drafter's own affair."""
    use_drafter(
        monkeypatch,
        ScriptedDrafter(
            lambda query: Draft((1,) * query.count) if len(query.tokens) <= 10 else Draft()
        ),
    )
    with running(tiny) as engine:
        stream = engine.one(PROMPT, greedy(12))
    assert [o.verify_step is not None for o in stream.outputs[:5]] == [False] + [True] * 4
    assert stream.outputs[5].gate_reason is GateReason.NO_DRAFT
    assert stream.outputs[5].verify_step is None


def test_many_threads_submit_and_stop_at_once(tiny: Target) -> None:
    with running(tiny, max_batch_rows=6, max_waiting=500, prefill_chunk_tokens=16) as engine:
        wanted = [engine.one(LONG[i : i + 20], greedy(15)).tokens for i in range(6)]
        ended: list[tuple[int, Stream]] = []

        def client(number: int) -> None:
            random = np.random.default_rng(number)
            mine = []
            for turn in range(25):
                which = int(random.integers(6))
                name = f"{number}-{turn}"
                if random.random() < 0.1:
                    engine.engine.stop(name)
                mine.append((which, engine.submit(name, LONG[which : which + 20], greedy(15))))
                if random.random() < 0.2:
                    engine.engine.stop(name)
                if random.random() < 0.3:
                    mine[-1][1].wait()
            ended.extend((which, stream.wait()) for which, stream in mine)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ended) == 150
        reasons = {stream.finish_reason for _, stream in ended}
        assert reasons == {FinishReason.LENGTH, FinishReason.CANCELLED}
        for which, stream in ended:
            assert stream.tokens == wanted[which][: len(stream.tokens)]
            assert (len(stream.tokens) == 15) == (stream.finish_reason is FinishReason.LENGTH)


def test_counters_add_up(tiny: Target) -> None:
    with running(tiny) as engine:
        streams = [engine.submit(f"{i}", LONG[i : i + 40], greedy(60)) for i in range(5)]
        for stream in streams:
            stream.wait()
        counters = engine.engine.counters()
    assert counters.emitted_tokens == sum(len(s.tokens) for s in streams) == 300
    assert counters.accepted_tokens == sum(s.accepted for s in streams) > 0
    assert counters.drafted_tokens == sum(s.drafted for s in streams)
    verified = [o for s in streams for o in s.outputs if o.verify_step is not None]
    assert counters.verify_steps == len(verified)
    own = sum(len(o.token_ids) - o.verify_step.accepted for o in verified if o.verify_step)
    plain = sum(1 for s in streams for o in s.outputs if o.verify_step is None)
    assert counters.accepted_tokens + own + plain == counters.emitted_tokens


@pytest.mark.parametrize("draft_len", [0, 4])
def test_why_the_draft_length_was_what_it_was(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, draft_len: int
) -> None:
    def two_when_long(query: DraftQuery) -> Draft:
        return Draft((1,) * query.count) if len(query.tokens) > len(PROMPT) + 1 else Draft()

    if draft_len:
        use_drafter(monkeypatch, ScriptedDrafter(two_when_long))
    with running(tiny, draft_len=draft_len) as engine:
        free = engine.one(PROMPT, greedy(12))
        capped = engine.one(PROMPT, greedy(12, max_draft_len=2))
        never = engine.one(PROMPT, greedy(12, max_draft_len=0))
    assert free.outputs[0].gate_reason is GateReason.PREFILL
    if draft_len == 0:
        assert free.gate_reasons == {GateReason.PREFILL, GateReason.DISABLED}
        return
    assert free.outputs[1].gate_reason is GateReason.NO_DRAFT
    assert free.outputs[2].gate_reason is GateReason.FIXED
    assert free.outputs[-1].gate_reason is GateReason.BUDGET
    assert capped.outputs[2].gate_reason is GateReason.REQUEST_CAP
    assert all(len(o.verify_step.draft_ids) <= 2 for o in capped.outputs if o.verify_step)
    assert never.gate_reasons <= {GateReason.PREFILL, GateReason.REQUEST_CAP, GateReason.BUDGET}
    assert never.drafted == 0


def test_drafts_that_found_no_block_are_told_apart_from_no_drafts(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft((1,) * query.count)))
    with running(tiny, kv_cache_bytes=7 * BLOCK_BYTES, max_batch_rows=2, started=False) as engine:
        streams = [engine.submit(f"{i}", LONG[i : i + 45], greedy(16)) for i in range(2)]
        engine.engine.start()
        reasons = set().union(*(stream.wait().gate_reasons for stream in streams))
    # The younger row never reaches a fourth block while the older one has it.
    assert reasons == {GateReason.PREFILL, GateReason.FIXED, GateReason.BUDGET}


def test_more_logprobs_than_there_are_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY | {"vocab_size": 5})
    with running(load_target(folder, torch.float32)) as engine:
        stream = engine.one((1, 2, 3), greedy(4, logprobs=20))
    assert len(stream.tokens) == 4
    assert all(len(row) == 5 for output in stream.outputs for row in output.top_ids)
