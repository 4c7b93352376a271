"""n > 1: independent generations of one request in one call."""

from __future__ import annotations

import asyncio

import grpc

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from tests.fakes.triton import FakeTriton, Received, Script, Step, words
from tests.support.gateway import Client, Outcome


def choices(outcome: Outcome) -> dict[int, Outcome]:
    """The events of each choice."""
    found: dict[int, Outcome] = {}
    for event in outcome.events:
        found.setdefault(event.index, Outcome()).events.append(event)
    return found


def by_choice(received: Received) -> Script:
    """Says which choice it is: the first keeps the caller's id."""
    name = received.id.rsplit("-", 1)[0]
    return Script(
        [Step({"output_ids": [n], "text_output": f"{name}/{n} "}, delay_s=0.002) for n in range(5)]
    )


async def test_every_choice_is_a_whole_stream_of_its_own(
    client: Client, triton: FakeTriton
) -> None:
    triton.script_for = by_choice
    outcome = await client.generate(prompt="Hi", request_id="mine", n=3)
    assert outcome.error is None
    found = choices(outcome)
    assert sorted(found) == [0, 1, 2]
    for index, choice in found.items():
        name = f"mine.{index}" if index else "mine"
        assert choice.kinds == ["started", *["tokens"] * 5, "finished"]
        assert choice.events[0].started.request_id == name
        assert choice.text == "".join(f"{name}/{n} " for n in range(5))
        usage = pb.Usage(prompt_tokens=3, output_tokens=5, cached_tokens=1)
        assert choice.finished.usage == usage


async def test_seeds_differ_and_the_first_is_the_callers(
    client: Client, triton: FakeTriton
) -> None:
    def seeds() -> list[int]:
        found = sorted(triton.generations, key=lambda received: received.id)
        triton.generations = []
        return [received.tensors["seed"][0] for received in found]

    for seed in (5, 6, 2**64 - 1):
        sampling = pb.SamplingParameters(seed=seed)
        await client.generate(prompt="Hi", request_id="a", n=4, sampling=sampling)
        first = seeds()
        await client.generate(prompt="Hi", request_id="b", n=4, sampling=sampling)
        assert seeds() == first
        # "a-<hex>" comes before "a.1-<hex>".
        assert first[0] == seed
        assert len({*first, seed + 1, seed + 2, seed + 3}) == 7
    await client.generate(prompt="Hi", n=2)
    assert all("seed" not in received.tensors for received in triton.generations)


async def test_one_choice_is_an_ordinary_generation(client: Client, triton: FakeTriton) -> None:
    outcome = await client.generate(prompt="Hi", n=1)
    assert outcome.kinds == ["started", "tokens", "tokens", "finished"]
    assert len(triton.generations) == 1


async def test_leaving_ends_all_of_them(client: Client, triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.005)], endless=True)
    call = client.generation.Generate(pb.GenerateRequest(prompt="Hi", n=4))
    for _ in range(10):
        await call.read()
    call.cancel()
    await triton.wait_for(lambda: len(triton.stops) == 4)
    assert sorted(triton.stops) == sorted(each.id for each in triton.generations)
    outcome = await client.generate(prompt="Hi", n=3, timeout=0.3)
    assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await triton.wait_for(lambda: len(triton.stops) == 7)


async def test_the_first_that_fails_ends_the_call_behind_its_events(
    client: Client, triton: FakeTriton
) -> None:
    failure = to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "gone"))
    endless = Script([Step({"output_ids": [1]}, delay_s=0.005)], endless=True)
    triton.scripts = [endless, Script(words("a", "b").steps, in_band_error=failure), endless]
    outcome = await client.generate(prompt="Hi", n=3)
    assert (outcome.code, outcome.message) == (grpc.StatusCode.UNAVAILABLE, "gone")
    ended = [event for event in outcome.events if event.HasField("finished")]
    assert [event.finished.usage.output_tokens for event in ended] == [2]
    assert outcome.events[-1] == ended[0]
    await triton.wait_for(lambda: len(triton.stops) == 3)


async def test_an_id_in_use_is_refused_for_every_choice(client: Client, triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.005)], endless=True)
    first = client.generation.Generate(pb.GenerateRequest(prompt="Hi", request_id="a", n=2))
    await first.read()
    assert (await client.generate(prompt="Hi", request_id="a.1")).code is (
        grpc.StatusCode.ALREADY_EXISTS
    )
    first.cancel()
    await triton.wait_for(lambda: len(triton.stops) == 2)


async def test_a_stop_string_ends_only_its_own_choice(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [words("a", "#", "b"), words("c", "d", "e")]
    found = choices(await client.generate(prompt="Hi", n=2, stop=["#"]))
    reasons = {found[index].text: found[index].finished.finish_reason for index in found}
    assert reasons == {"a": pb.FINISH_REASON_STOP_STRING, "cde": pb.FINISH_REASON_LENGTH}


async def test_many_calls_with_many_choices(client: Client, triton: FakeTriton) -> None:
    triton.script_for = by_choice
    outcomes = await asyncio.gather(
        *(client.generate(prompt="Hi", request_id=f"r{number}", n=8) for number in range(4))
    )
    for number, outcome in enumerate(outcomes):
        assert outcome.code is grpc.StatusCode.OK
        for index, choice in choices(outcome).items():
            name = f"r{number}.{index}" if index else f"r{number}"
            assert choice.text == "".join(f"{name}/{n} " for n in range(5))
