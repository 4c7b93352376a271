"""Replicas die, freeze and come back; streams go on as if nothing had happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from draftgate._pb.draftgate.v1 import admin_pb2
from draftgate.text import Tokenizer
from tests.chaos.conftest import begun, check_same, run_all, running_replicas, streams

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]

SHORT, LONG, LONGEST = 120, 300, 900
"""Tokens. The gateway reads ahead of its clients: streams must not be over when they are hit."""


async def test_a_killed_replica_costs_no_token(model_dir: Path, tokenizer: Tokenizer) -> None:
    async with running_replicas(model_dir, 2) as replicas:
        undisturbed = streams(8, LONG, tokenizer)
        await run_all(replicas.client, undisturbed)
        found = streams(8, LONG, tokenizer)
        running = asyncio.create_task(run_all(replicas.client, found))
        await begun(found, 1)
        busier = max(
            (0, 1), key=[(await replicas.state_of(n)).generations for n in (0, 1)].__getitem__
        )
        replicas.kill(busier)
        await running
        check_same(found, undisturbed)
        assert sum(stream.outcome.finished.resumes for stream in found) > 0


@pytest.mark.slow
async def test_ten_kills_with_32_streams_cost_no_token(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async with running_replicas(model_dir, 2) as replicas:
        undisturbed = streams(32, LONGEST, tokenizer)
        await run_all(replicas.client, undisturbed)
        check_same(undisturbed, undisturbed)
        for number in range(10):
            found = streams(32, LONGEST, tokenizer)
            running = asyncio.create_task(run_all(replicas.client, found))
            await begun(found, 1 + 10 * number)
            victim = number % 2
            had = (await replicas.state_of(victim)).generations
            replicas.kill(victim)
            await running
            check_same(found, undisturbed)
            assert had > 0
            assert sum(stream.outcome.finished.resumes for stream in found) > 0
            await replicas.all_ready()


@pytest.mark.slow
async def test_with_one_replica_streams_wait_for_its_restart(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async with running_replicas(model_dir, 1) as replicas:
        undisturbed = streams(32, LONGEST, tokenizer)
        await run_all(replicas.client, undisturbed)
        found = streams(32, LONGEST, tokenizer)
        running = asyncio.create_task(run_all(replicas.client, found))
        await begun(found, 5)
        replicas.kill(0)
        await running
        check_same(found, undisturbed)
        assert all(stream.outcome.finished.resumes == 1 for stream in found)


@pytest.mark.slow
async def test_a_frozen_replica_loses_its_streams_to_the_other(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async with running_replicas(model_dir, 2) as replicas:
        undisturbed = streams(32, LONGEST, tokenizer)
        await run_all(replicas.client, undisturbed)
        found = streams(32, LONGEST, tokenizer)
        running = asyncio.create_task(run_all(replicas.client, found))
        await begun(found, 5)
        had = (await replicas.state_of(0)).generations
        assert had > 0
        replicas.freeze(0)
        await running
        check_same(found, undisturbed)
        moved = [stream.outcome.finished.resumes for stream in found]
        assert sum(moved) == had
        assert set(moved) == {0, 1}
        frozen = await replicas.state_of(0)
        assert frozen.ejections == 1
        assert frozen.state in (
            admin_pb2.REPLICA_STATE_EJECTED,
            admin_pb2.REPLICA_STATE_NOT_READY,
        )
        replicas.thaw(0)
        await replicas.all_ready()
        again = streams(4, SHORT, tokenizer)
        await run_all(replicas.client, again)
        assert all(stream.tokens == SHORT for stream in again)
