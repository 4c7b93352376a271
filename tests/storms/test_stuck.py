"""Two hundred readers that stop reading: they lose their generations and cost nobody else any."""

from __future__ import annotations

import asyncio

from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.storms.conftest import GENERATING, all_stopped, crowd
from tests.support.gateway import Client, connected, running_gateway
from tests.support.holdings import at_rest, settled

READERS = 200
FLOOD = Script(
    [
        Step({"output_ids": [10], "text_output": "x"}),
        Step({"output_ids": [10], "text_output": "x" * 32768}, delay_s=0.1),
    ],
    endless=True,
)
LONG = words(*[f"{number} " for number in range(200)])


async def test_stuck_readers_are_cut_off_and_leave_nothing(triton: FakeTriton) -> None:
    scripts = {"Hi": FLOOD, "long": LONG, "short": words("o", "k")}
    triton.script_for = lambda received: scripts[received.tensors["text_input"]]
    triton.description = {**triton.description, "max_batch_rows": READERS + 1}
    async with (
        running_gateway(triton.target, probe_interval_s=1.0, write_timeout_s=1.0) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        assert (await client.generate(prompt="short")).text == "ok"
        before = await at_rest()
        async with crowd(gateway.port, READERS, GENERATING) as readers:
            for each in readers:
                each.stop_reading()
            # While they are there, whoever reads gets everything.
            assert (await client.generate(prompt="long")).text.endswith(" 199 ")
            await all_stopped(triton)
            assert len(triton.stops) == READERS
            [replica] = (await client.replicas()).values()
            assert (replica.generations, replica.outstanding_tokens) == (0, 0)
            # Their calls wait for the transport to take their status, with what they asked for.
            # Their places are free again, and nothing of what came back is kept.
            assert await texts(client, READERS + 1) == {"ok"}
            await settled(
                before,
                *("GenerateRequest", "_Call", "ServerSpan", "DraftgateError", "file descriptors"),
                *("_schedule_rpc_coro", "_handle_exceptions"),  # the call, of which gRPC has both
                "GenerateOnceResponse",  # those of the others, here at the client
            )
        await settled(before)


async def texts(client: Client, count: int) -> set[str]:
    """What comes of so many short generations at once."""
    calls = (client.generate_once(prompt="short") for _ in range(count))
    return {answer.choices[0].text for answer in await asyncio.gather(*calls)}
