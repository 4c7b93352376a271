"""A set of replicas against fake Tritons: who is used, who is not, who comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from draftgate.upstream.addresses import Addresses, DnsName
from draftgate.upstream.breaker import BreakerLimits
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.replica import Attempt, Probe, Replica, ReplicaLimits, ReplicaState
from draftgate.upstream.replicas import ReplicaSet, ReplicaSetConfig
from draftgate.upstream.types import Chunk, GenerationRequest, TokenPrompt
from tests.fakes.triton import FakeTriton, Script, Step, words

ENDLESS = Script([Step({"output_ids": [1], "text_output": "x"}, delay_s=0.005)], endless=True)
SILENT = Script([Step(delay_s=3600.0)], deaf=True)
QUICK = ReplicaLimits(
    stall_s=0.3,
    first_chunk_stall_s=0.3,
    slow_start_s=0.0,
    breaker=BreakerLimits(min_open_s=0.05, probation_s=0.5),
)
NAME = DnsName("replicas.test", 8001)


@pytest.fixture
async def tritons() -> AsyncIterator[list[FakeTriton]]:
    found = [FakeTriton() for _ in range(3)]
    for triton in found:
        await triton.start()
    yield found
    for triton in found:
        await triton.stop()


@asynccontextmanager
async def started(
    *tritons: FakeTriton, names: tuple[DnsName, ...] = (), **config: Any
) -> AsyncIterator[ReplicaSet]:
    resolve = {"resolve": config.pop("resolve")} if names else {}
    replicas = ReplicaSet(
        Addresses(tuple(triton.target for triton in tritons), names),
        ReplicaSetConfig(**({"limits": QUICK, "affinity_tokens": 0} | config)),
        lambda target: TritonClient(TritonClientConfig(target, drain_timeout_s=0.2)),
        probe=Probe(interval_s=0.02),
        **resolve,
    )
    replicas.start()
    try:
        await until(replicas, lambda: sum(each.usable for each in replicas.replicas) >= 1)
        await until(replicas, lambda: all(r.usable for r in replicas.replicas))
        yield replicas
    finally:
        await replicas.close()


async def until(replicas: ReplicaSet, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await replicas.changed.wait()


def request(number: int = 0, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(f"r{number}", TokenPrompt((1, 2)), SamplingParams(max_tokens))


async def acquire(replicas: ReplicaSet, key: bytes = bytes(16), **fields: Any) -> Replica:
    async with asyncio.timeout(20):
        return await replicas.acquire(tokens=100, key=key, **fields)


@asynccontextmanager
async def running(replica: Replica, number: int = 0) -> AsyncIterator[Attempt]:
    attempt = Attempt(replica, request(number))
    async with attempt.started(()):
        yield attempt


async def chunk(attempt: Attempt) -> Chunk:
    found = await anext(attempt.generation)
    attempt.count(found)
    return found


async def test_the_one_with_the_least_to_do_is_next(tritons: list[FakeTriton]) -> None:
    for triton in tritons:
        triton.default = ENDLESS
    async with started(*tritons) as replicas, AsyncExitStack() as stack:
        for number in range(9):
            replica = await acquire(replicas)
            await stack.enter_async_context(running(replica, number))
        assert [each.generations for each in replicas.replicas] == [3, 3, 3]
        assert [each.load.tokens for each in replicas.replicas] == [306, 306, 306]


async def test_tokens_that_came_are_not_outstanding_any_more(tritons: list[FakeTriton]) -> None:
    tritons[0].default = ENDLESS
    async with started(tritons[0]) as replicas:
        (replica,) = replicas.replicas
        async with running(replica) as attempt:
            assert replica.load.tokens == 102
            await chunk(attempt)
            assert replica.load.tokens == 99
            await chunk(attempt)
            assert replica.load.tokens == 98
        assert replica.load.tokens == 0


async def test_a_prefix_goes_where_it_went_before(tritons: list[FakeTriton]) -> None:
    for triton in tritons:
        triton.default = ENDLESS
    async with started(*tritons, affinity_tokens=250) as replicas, AsyncExitStack() as stack:
        went = []
        for number in range(4):
            replica = await acquire(replicas, key=b"k" * 16)
            await stack.enter_async_context(running(replica, number))
            went.append(replica.target)
        assert len(set(went[:3])) == 1
        assert went[3] != went[0]  # That would have been too much.


async def test_a_drained_replica_gets_nothing_new(tritons: list[FakeTriton]) -> None:
    async with started(*tritons[:2]) as replicas:
        first, second = replicas.replicas
        first.draining = True
        for _ in range(5):
            assert await acquire(replicas) is second
        assert first.state is ReplicaState.DRAINING
        assert replicas.named("") is second
        assert replicas.named(first.target) is first
        second.draining = True
        assert not replicas.serving
        with pytest.raises(DraftgateError, match=f"{first.target}: draining; ") as caught:
            _ = replicas.engine
        assert caught.value.code is ErrorCode.UNAVAILABLE
        waiting = asyncio.create_task(acquire(replicas))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.draining = False
        replicas.notify()
        assert await waiting is first


async def test_an_unknown_replica_is_refused_by_name(tritons: list[FakeTriton]) -> None:
    async with started(tritons[0]) as replicas:
        with pytest.raises(DraftgateError, match="replica: got 'x:1', allowed: one of 127"):
            replicas.named("x:1")


async def test_a_loss_is_followed_by_a_look(tritons: list[FakeTriton]) -> None:
    async with started(tritons[0]) as replicas:
        (replica,) = replicas.replicas
        replica.lost()
        assert not replica.usable
        assert replica.serving  # Whether it is gone is not known yet.
        assert await acquire(replicas) is replica
        await tritons[0].stop()
        replica.lost()
        await until(replicas, lambda: not replica.serving)
        assert replica.state is ReplicaState.NOT_READY


async def test_losses_in_a_row_eject_it_until_it_emits_again(tritons: list[FakeTriton]) -> None:
    async with started(*tritons[:2]) as replicas:
        first, second = replicas.replicas
        tritons[0].default = Script(in_band_error="Server exiting")
        for _ in range(3):
            first.lost()
        assert (first.state, first.ejections) == (ReplicaState.EJECTED, 1)
        await until(replicas, lambda: bool(tritons[0].generations))
        # Ready as it is, it does not emit.
        await until(replicas, lambda: first.usable)
        for _ in range(5):
            assert await acquire(replicas) is second
        assert first.state is ReplicaState.EJECTED
        tritons[0].default = words("a")
        await until(replicas, lambda: first.state is ReplicaState.PROBATION)
        first.lost()
        assert (first.state, first.ejections) == (ReplicaState.EJECTED, 2)
        await until(replicas, lambda: first.state is ReplicaState.READY)


async def test_where_nothing_else_is_left_the_ejected_is_used(tritons: list[FakeTriton]) -> None:
    async with started(tritons[0]) as replicas:
        (replica,) = replicas.replicas
        tritons[0].default = Script(in_band_error="Server exiting")
        for _ in range(3):
            replica.lost()
        assert await acquire(replicas) is replica
        assert replica.ejected
        assert replicas.serving


async def test_one_that_emits_nothing_is_ejected_and_its_streams_end(
    tritons: list[FakeTriton], caplog: pytest.LogCaptureFixture
) -> None:
    async with started(*tritons[:2]) as replicas:
        first, second = replicas.replicas
        tritons[0].default, tritons[1].default = SILENT, ENDLESS
        async with running(second, 1) as moving, running(first, 2) as stalled:
            with pytest.raises(DraftgateError, match="emits nothing") as caught:
                async with asyncio.timeout(20):
                    await chunk(stalled)
            assert caught.value.code is ErrorCode.UNAVAILABLE
            await chunk(moving)
        assert (first.state, first.ejections) == (ReplicaState.EJECTED, 1)
        assert (second.state, second.ejections) == (ReplicaState.READY, 0)
        assert f"replica {first.target} is ejected: it emits nothing" in caplog.text
        tritons[0].default = words("a")
        await until(replicas, lambda: first.state is ReplicaState.READY)


async def test_a_stream_that_nobody_reads_is_no_stall(tritons: list[FakeTriton]) -> None:
    async with started(*tritons[:2]) as replicas:
        first, _ = replicas.replicas
        tritons[0].default = ENDLESS
        async with running(first, 1), running(first, 2) as finished:
            finished.generation.abandon(DraftgateError(ErrorCode.CANCELLED, "enough"))
            await asyncio.sleep(3 * QUICK.stall_s)
            assert first.ejections == 0


async def test_a_new_replica_has_not_stalled_before_anything_was_asked_of_it(
    tritons: list[FakeTriton],
) -> None:
    async with started(*tritons[:1]) as replicas:
        [only] = replicas.replicas
        tritons[0].default = Script([Step({"output_ids": [1]}, delay_s=0.5)])
        async with running(only) as attempt:
            assert not only.stalled()
            assert (await chunk(attempt)).token_ids == (1,)


async def test_a_long_prompt_is_given_more_time(tritons: list[FakeTriton]) -> None:
    limits = replace(QUICK, stall_s=0.5, first_chunk_stall_s=60.0)
    async with started(*tritons[:2], limits=limits) as replicas:
        first, _ = replicas.replicas
        tritons[0].default = Script([Step({"output_ids": [1]}, delay_s=1.5)])
        async with running(first) as attempt:
            assert (await chunk(attempt)).token_ids == (1,)
        assert first.ejections == 0


async def test_a_replica_that_came_back_is_ready_again(tritons: list[FakeTriton]) -> None:
    async with started(*tritons[:2]) as replicas:
        first, second = replicas.replicas
        port = int(first.target.rpartition(":")[2])
        await tritons[0].stop()
        await until(replicas, lambda: not first.usable)
        assert await acquire(replicas) is second
        tritons[0].description = {**tritons[0].description, "name": "newer"}
        await tritons[0].start(port)
        await until(replicas, lambda: first.usable)
        assert first.engine is not None
        assert first.engine.name == "newer"


def said_of(target: str, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and message of the records that are about this replica."""
    return [
        (each.levelname, each.getMessage())
        for each in caplog.records
        if getattr(each, "replica", "") == target
    ]


async def test_what_stays_wrong_is_told_once(
    tritons: list[FakeTriton], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "draftgate")
    first, looks = tritons[0].target, 0
    async with started(tritons[0]) as replicas:
        port = int(first.rpartition(":")[2])
        await tritons[0].stop()
        while looks < 20:  # Each is told to who waits for a change.
            await replicas.changed.wait()
            looks += replicas.replicas[0].engine is None
        tritons[0].not_ready_models.add("engine")
        await tritons[0].start(port)
        await until(replicas, lambda: "models not ready" in replicas.replicas[0].reason)
        tritons[0].not_ready_models.clear()
        await until(replicas, lambda: replicas.replicas[0].usable)
    away = f"replica {first} is not ready"
    told = said_of(first, caplog)
    assert told[0] == ("INFO", f"replica {first} is ready")
    assert told.count(("WARNING", f"{away}: the model server cannot be reached")) <= 2
    assert told[-2:] == [
        ("WARNING", f"{away}: models not ready: engine"),
        ("WARNING", f"replica {first} is ready again"),
    ]
    # Why it cannot be reached, in gRPC's words.
    raw = [
        each.getMessage() for each in caplog.records if each.name == "draftgate.upstream.failures"
    ]
    assert len(raw) == len(set(raw))


async def test_an_entry_that_is_not_there_is_an_error_in_the_log(
    tritons: list[FakeTriton], caplog: pytest.LogCaptureFixture
) -> None:
    target = tritons[0].target
    replicas = ReplicaSet(
        Addresses((target,), ()),
        ReplicaSetConfig(),
        lambda target: TritonClient(TritonClientConfig(target, entry_model="nonsense")),
        probe=Probe(interval_s=0.02),
    )
    replicas.start()
    for _ in range(10):
        await replicas.changed.wait()
    await replicas.close()
    assert said_of(target, caplog) == [
        (
            "ERROR",
            f"replica {target} is not ready: the model server cannot be used: it has no model "
            "nonsense (entry), but engine, ensemble, postprocessing, preprocessing",
        )
    ]


async def test_a_name_is_looked_up_again_and_again(tritons: list[FakeTriton]) -> None:
    answers: list[tuple[str, ...]] = [(tritons[0].target,)]

    async def resolve(name: DnsName, timeout_s: float) -> tuple[str, ...]:
        assert name == NAME
        if not answers[0]:
            raise DraftgateError(ErrorCode.UNAVAILABLE, "no answer")
        return answers[0]

    config: dict[str, Any] = {"names": (NAME,), "resolve": resolve, "resolve_interval_s": 0.02}
    tritons[0].default = ENDLESS
    async with started(**config) as replicas:
        (first,) = replicas.replicas
        async with running(first) as attempt:
            answers[0] = (tritons[1].target, tritons[2].target)
            await until(replicas, lambda: len(replicas.replicas) == 3 and first.leaving)
            # It finishes what it has, and gets nothing new.
            assert first.state is ReplicaState.DRAINING
            await until(replicas, lambda: sum(each.usable for each in replicas.replicas) == 2)
            for _ in range(5):
                assert await acquire(replicas) is not first
            await chunk(attempt)
        await until(replicas, lambda: first not in replicas.replicas)
        # Without an answer everything stays as it is.
        answers[0] = ()
        await asyncio.sleep(0.1)
        assert {each.target for each in replicas.replicas} == {
            tritons[1].target,
            tritons[2].target,
        }
        answers[0] = (tritons[1].target,)
        await until(replicas, lambda: len(replicas.replicas) == 1)


async def test_without_any_address_nothing_is_served() -> None:
    async def resolve(name: DnsName, timeout_s: float) -> tuple[str, ...]:
        raise DraftgateError(ErrorCode.UNAVAILABLE, "no answer")

    replicas = ReplicaSet(
        Addresses((), (NAME,)),
        ReplicaSetConfig(),
        lambda target: TritonClient(TritonClientConfig(target)),
        probe=Probe(),
        resolve=resolve,
    )
    replicas.start()
    assert not replicas.serving
    with pytest.raises(DraftgateError, match="no address of a model server is known yet"):
        _ = replicas.engine
    await replicas.close()
