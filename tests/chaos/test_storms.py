"""Crowds of clients without manners, in front of a real tritonserver: its rows come free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.text import Tokenizer
from draftgate.upstream.client import TritonClient, TritonClientConfig
from tests.chaos.conftest import check_same, run_all, running_replicas, streams
from tests.support.gateway import Client
from tests.support.holdings import at_rest, settled
from tests.support.rude import RudeClient

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

GENERATE = "/draftgate.v1.GenerationService/Generate"
CROWD = 60
"""As many as the engine has rows, almost."""


async def rows(client: Client) -> tuple[int, int, int]:
    """Rows that run, rows that wait, and tokens in the KV cache."""
    state = (await client.gate.GetState(gate_pb2.GetStateRequest())).state
    return state.running_rows, state.waiting_rows, state.kv_used_tokens


@pytest.mark.parametrize("manner", ["vanishing", "stuck"])
async def test_the_engines_rows_come_free(
    model_dir: Path, tokenizer: Tokenizer, manner: str
) -> None:
    async with running_replicas(model_dir, 1) as replicas:
        undisturbed = streams(4, 60, tokenizer)
        await run_all(replicas.client, undisturbed)
        before = await at_rest()
        request = pb.GenerateRequest(
            prompt="Why is the sky blue?",
            max_tokens=4000,
            # Enough in each event for a reader that stands still to be noticed soon.
            sampling=pb.SamplingParameters(temperature=0.0, logprobs=20),
        )
        crowd = [
            await RudeClient.connect(replicas.gateway.port, window_bytes=4096) for _ in range(CROWD)
        ]
        for each in crowd:
            each.call(GENERATE, [request])
        await asyncio.gather(*(each.message() for each in crowd))
        assert (await replicas.state_of(0)).generations == CROWD
        for each in crowd:
            if manner == "vanishing":
                each.vanish()
            else:
                each.stop_reading()
        async with asyncio.timeout(120):
            while any(await rows(replicas.client)):
                await asyncio.sleep(0.05)
        triton = TritonClient(TritonClientConfig(replicas.servers[0].grpc_target))
        counters = await triton.counters()
        await triton.close()
        assert counters.rows_freed_cancelled > 0
        assert (counters.running_rows, counters.waiting_rows) == (0, 0)
        assert counters.kv_used_blocks == 0
        for each in crowd:
            each.vanish()
        await settled(before)
        # Whoever comes now gets what came before the crowd.
        found = streams(4, 60, tokenizer)
        await run_all(replicas.client, found)
        check_same(found, undisturbed)
