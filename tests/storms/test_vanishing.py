"""A thousand clients open a stream, read one event and are gone: nothing of them stays."""

from __future__ import annotations

import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway.admission import AdmissionConfig
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.storms.conftest import GENERATING, WATCHING, all_stopped, crowd
from tests.support.gateway import Outcome, connected, running_gateway
from tests.support.holdings import at_rest, settled
from tests.support.rude import RudeClient

ONE_EVENT = Script(
    [
        Step({"output_ids": [10], "text_output": "x"}),
        Step({"output_ids": [10], "text_output": "x"}, delay_s=2.0),
    ],
    endless=True,
)
"""Something to read at once; then little, for a thousand of them run on one event loop."""

_FULL = pytest.param(1000, 5.0, marks=pytest.mark.slow)


@pytest.mark.parametrize(("count", "within_s"), [(200, 30.0), _FULL])
async def test_clients_that_vanish_leave_nothing(
    triton: FakeTriton, count: int, within_s: float
) -> None:
    """No generation at the model server, no place, no task, no file descriptor and no object."""
    triton.description = {**triton.description, "max_batch_rows": count}
    async with (
        running_gateway(triton.target, probe_interval_s=1.0) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        assert (await client.generate(prompt="Hi")).text == "Hello world"
        before = await at_rest()
        triton.default = ONE_EVENT
        async with crowd(gateway.port, count, (*GENERATING, *WATCHING)):
            running = [each for each in triton.generations if not each.ended]
            assert len(running) == sum(1 for number in range(count) if number % 6 < 3)
        await settled(before, within_s=within_s)
        await all_stopped(triton)
        [replica] = (await client.replicas()).values()
        assert (replica.generations, replica.outstanding_tokens) == (0, 0)
        triton.default = words("still ", "here")
        assert (await client.generate(prompt="Hi")).text == "still here"


async def test_clients_that_vanish_before_their_turn_leave_nothing(triton: FakeTriton) -> None:
    """They wait for a place, and have nothing to read yet."""
    admission = AdmissionConfig(max_concurrency=1, max_waiting=200, max_wait_s=3600.0)
    async with (
        running_gateway(triton.target, probe_interval_s=1.0, admission=admission) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        assert (await client.generate(prompt="Hi")).text == "Hello world"
        before = await at_rest()
        triton.default = ONE_EVENT
        running = client.generation.Generate(pb.GenerateRequest(prompt="first"))
        await running.read()
        opening = GENERATING[0]
        clients = [await RudeClient.connect(gateway.port) for _ in range(200)]
        for each in clients:
            each.call(opening.path, opening.messages)
        # Whoever is refused because so many wait knows that all of them are in.
        outcome = Outcome()
        while "1 generations run and 200 wait" not in outcome.message:
            outcome = await client.generate(prompt="Hi", timeout=0.2)
        for each in clients:
            each.vanish()
        running.cancel()
        await settled(before)
        await all_stopped(triton)
        triton.default = words("still ", "here")
        assert (await client.generate(prompt="Hi")).text == "still here"
