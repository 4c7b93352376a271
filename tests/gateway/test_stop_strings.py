"""Stop strings end a generation, upstream too; what ended one is said in its last event."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import Client


async def test_the_text_ends_before_the_stop_string(client: Client, triton: FakeTriton) -> None:
    more = words("One.", " Two", ". Three. ", "and so on")
    triton.scripts = [Script(more.steps, endless=True)]
    outcome = await client.generate(prompt="Hi", stop=["Four", "Three"])
    assert outcome.error is None
    assert outcome.text == "One. Two. "
    assert outcome.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert outcome.finished.WhichOneof("matched") == "stop_string"
    assert outcome.finished.stop_string == "Three"
    # The endless generation was ended, as a caller who leaves would have ended it.
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])
    await triton.wait_for(lambda: triton.generations[0].ended == "stopped")


async def test_text_is_held_back_only_while_it_may_become_one(
    client: Client, triton: FakeTriton
) -> None:
    triton.scripts = [words("a", "b<", "/", "x", "</", "s", ">", "c")]
    outcome = await client.generate(prompt="Hi", stop=["</s>"])
    assert [chunk.text for chunk in outcome.chunks] == ["a", "b", "", "</x", "", "", ""]
    assert outcome.finished.stop_string == "</s>"
    # Tokens are told at once: of every step up to the one that completed the stop string.
    assert [token.id for token in outcome.tokens] == [10, 11, 12, 13, 14, 15, 16]
    assert outcome.finished.usage.output_tokens == 7


async def test_the_last_chunk_has_all_tokens_of_its_step(
    client: Client, triton: FakeTriton
) -> None:
    step = Step({"output_ids": [5, 6, 7], "text_output": "a#b"})
    triton.scripts = [Script([step, step])]
    outcome = await client.generate(prompt="Hi", stop=["#"])
    assert outcome.text == "a"
    assert [token.id for token in outcome.tokens] == [5, 6, 7]
    assert outcome.finished.usage.output_tokens == 3


async def test_what_was_held_back_comes_at_the_end(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [words("a", "b<", "/")]
    outcome = await client.generate(prompt="Hi", stop=["</s>"])
    assert [chunk.text for chunk in outcome.chunks] == ["a", "b", "</"]
    assert outcome.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert outcome.finished.WhichOneof("matched") is None
    assert triton.stops == []


async def test_what_was_held_back_comes_before_a_failure(
    client: Client, triton: FakeTriton
) -> None:
    failure = to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "gone"))
    triton.scripts = [Script(words("a", "b<").steps, in_band_error=failure)]
    outcome = await client.generate(prompt="Hi", stop=["</s>"])
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert outcome.text == "ab<"
    assert outcome.kinds == ["started", "tokens", "tokens", "tokens", "finished"]
    assert outcome.finished.usage.output_tokens == 2


async def test_a_stop_string_in_the_last_step_counts_and_needs_no_stop(
    client: Client, triton: FakeTriton
) -> None:
    triton.scripts = [Script(words("a", "b#c").steps, finish_reason="eos")]
    outcome = await client.generate(prompt="Hi", stop=["#"])
    assert outcome.text == "ab"
    assert outcome.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert outcome.finished.WhichOneof("matched") == "stop_string"
    assert (await client.generate(prompt="Hi")).text == "Hello world"
    assert triton.stops == []


async def test_the_stop_string_may_be_all_there_is(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [words("#", "a")]
    outcome = await client.generate(prompt="Hi", stop=["#"])
    assert outcome.text == ""
    assert outcome.kinds == ["started", "tokens", "finished"]
    assert outcome.finished.finish_reason == pb.FINISH_REASON_STOP_STRING


@pytest.mark.parametrize(
    ("reason", "last_ids", "which", "token"),
    [
        ("eos", [7, 2], "eos_token_id", 2),
        ("stop_token", [7, 30], "stop_token_id", 30),
        # The engine of another profile may keep the token to itself.
        ("eos", [7], None, 0),
        ("eos", [], None, 0),
        ("stop_token", [7], None, 0),
        ("length", [7, 30], None, 0),
    ],
)
async def test_the_token_that_ended_it_is_named(
    client: Client,
    triton: FakeTriton,
    reason: str,
    last_ids: Sequence[int],
    which: str | None,
    token: int,
) -> None:
    steps = [Step({"output_ids": [5], "text_output": "a"}), Step({"output_ids": list(last_ids)})]
    triton.scripts = [Script(steps, finish_reason=reason)]
    sampling = pb.SamplingParameters(stop_token_ids=[30, 31])
    finished = (await client.generate(prompt="Hi", sampling=sampling)).finished
    assert finished.WhichOneof("matched") == which
    assert which is None or getattr(finished, which) == token


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    pieces=st.lists(st.text("ab🙂", max_size=3), min_size=1, max_size=8),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3),
)
async def test_over_the_wire_it_equals_searching_the_whole_text(
    client: Client, triton: FakeTriton, pieces: list[str], stops: list[str]
) -> None:
    triton.scripts = [words(*pieces)]
    outcome = await client.generate(prompt="Hi", stop=stops)
    whole = "".join(pieces)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert outcome.text == whole
        assert outcome.finished.finish_reason == pb.FINISH_REASON_LENGTH
        return
    upto = whole[: min(ends)]
    matched = max((stop for stop in stops if upto.endswith(stop)), key=len)
    assert outcome.text == upto.removesuffix(matched)
    assert outcome.finished.stop_string == matched
