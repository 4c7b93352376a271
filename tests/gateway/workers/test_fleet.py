"""Real worker processes on one port, in front of a stand-in for Triton."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import admin_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import GatewayConfig
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.auth import SecurityConfig
from draftgate.gateway.config import RequestRules
from draftgate.gateway.defaults import RequestDefaults
from draftgate.gateway.orders import RefuseNew, Reload
from draftgate.gateway.workers import Fleet, FleetLimits
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import MODEL, Client, Outcome
from tests.support.tenants import TenantsFile
from tests.support.workers import clients, running_fleet, runs, until

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.02)], endless=True)


def slow(tokens: int, delay_s: float = 0.02) -> Script:
    return Script(
        [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s) for n in range(tokens)]
    )


def running(triton: FakeTriton) -> int:
    return sum(not each.ended for each in triton.generations)


def of(triton: FakeTriton, peer: str) -> int:
    """How many run of one worker."""
    return sum(not each.ended and each.peer == peer for each in triton.generations)


async def begun(found: Sequence[Client], count: int, key: str = "") -> list[grpc.aio.Call]:
    """So many generations that have their first event, on as many connections."""
    metadata = (("x-api-key", key),) if key else ()
    request = pb.GenerateRequest(prompt="Hi")
    calls = [each.generation.Generate(request, metadata=metadata) for each in found[:count]]
    for call in calls:
        await call.read()
    return calls


async def test_all_serve_and_together_run_no_more_than_may(triton: FakeTriton) -> None:
    triton.description = {**triton.description, "max_batch_rows": 3}
    triton.default = slow(5)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, running(triton))
            await asyncio.sleep(0.002)

    async with (
        running_fleet(triton.target, admission=AdmissionConfig(max_waiting=100)) as fleet,
        clients(f"127.0.0.1:{fleet.port}") as found,
    ):
        watching = asyncio.create_task(watch())
        outcomes = await asyncio.gather(*(each.generate(prompt="Hi") for each in found * 3))
        watching.cancel()
        assert {each.code for each in outcomes} == {grpc.StatusCode.OK}
        assert most == 3
        assert len({each.peer for each in triton.generations}) == 2

        triton.default = ENDLESS
        calls = await begun(found, 3)
        waiting = [asyncio.create_task(each.generate(prompt="Hi")) for each in found]
        await asyncio.sleep(0.2)
        assert running(triton) == 3
        triton.default = slow(1)
        for call in calls:
            call.cancel()
        assert {each.code for each in await asyncio.gather(*waiting)} == {grpc.StatusCode.OK}

        triton.default = ENDLESS
        first = found[0].generation.Generate(pb.GenerateRequest(prompt="Hi", request_id="mine"))
        await first.read()
        same = await asyncio.gather(
            *(each.generate(prompt="Hi", request_id="mine") for each in found)
        )
        assert {each.code for each in same} == {grpc.StatusCode.ALREADY_EXISTS}
        first.cancel()

        # Not a copy of the port but the port: nobody else may come in between.
        other = Fleet(
            GatewayConfig(triton.target, MODEL, listen=f"127.0.0.1:{fleet.port}"),
            2,
            ("false",),
            log_settings={},
        )
        with pytest.raises(DraftgateError, match=f"port {fleet.port} is in use"):
            await other.start()


async def test_a_tenants_limit_and_its_reload_hold_over_all(
    triton: FakeTriton, tmp_path: Path
) -> None:
    triton.default = ENDLESS
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme", max_concurrency=3)
    security = SecurityConfig(tenants_file=tenants.path, reload_interval_s=3600)
    async with (
        running_fleet(triton.target, security=security) as fleet,
        clients(f"127.0.0.1:{fleet.port}") as found,
    ):
        calls = await begun(found, 3, key)
        metadata = (("x-api-key", key),)
        refused = await asyncio.gather(
            *(each.generate(prompt="Hi", metadata=metadata) for each in found)
        )
        assert {each.code for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {each.reason for each in refused} == {"TENANT_CONCURRENCY"}
        assert running(triton) == 3

        second = tenants.add("other")
        assert await fleet.tell(Reload(admission=AdmissionConfig(max_concurrency=4))) == 3
        calls += await begun(found, 1, second)
        full = asyncio.create_task(
            found[1].generate(prompt="Hi", metadata=(("x-api-key", second),))
        )
        await asyncio.sleep(0.1)
        assert running(triton) == 4
        triton.default = slow(1)
        calls[0].cancel()
        assert (await full).code is grpc.StatusCode.OK
        tenants.path.write_text("{")
        with pytest.raises(DraftgateError, match=r"tenants\.yaml"):
            await fleet.tell(Reload(admission=AdmissionConfig(max_concurrency=1)))
        for call in calls:
            call.cancel()


async def test_a_worker_that_begins_to_listen_while_the_fleet_ends_is_ended_too(
    triton: FakeTriton,
) -> None:
    async with running_fleet(triton.target) as fleet:
        before = fleet.pids[1]
        os.kill(before, signal.SIGKILL)
        # Without a pause: it has begun to listen, and the one who starts it again has not heard.
        while (pid := fleet.pids.get(1)) in (None, before):
            await asyncio.sleep(0)
        assert pid is not None
        await fleet.drain(5.0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_new_rules_hold_in_every_worker_and_in_those_to_come(triton: FakeTriton) -> None:
    rules = replace(
        RequestRules.of(GatewayConfig("t:1", MODEL)),
        defaults=RequestDefaults(max_tokens=7, temperature=0.5),
        max_choices=3,
    )

    async def told(found: Sequence[Client]) -> set[tuple[int, int]]:
        models = await asyncio.gather(*(each.get_model() for each in found))
        return {(each.defaults.max_tokens, each.limits.max_choices) for each in models}

    async with running_fleet(triton.target) as fleet:
        address = f"127.0.0.1:{fleet.port}"
        async with clients(address) as found:
            assert await told(found) == {(256, 8)}
            await fleet.tell(Reload(rules=rules))
            assert await told(found) == {(7, 3)}
        before = dict(fleet.pids)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: fleet.pids.get(1) not in (None, before[1]))
        async with clients(address) as found:
            assert await told(found) == {(7, 3)}


async def test_a_worker_that_is_killed_gives_its_places_back_and_comes_again(
    triton: FakeTriton,
) -> None:
    triton.description = {**triton.description, "max_batch_rows": 16}
    triton.default = ENDLESS
    async with running_fleet(triton.target) as fleet:
        address = f"127.0.0.1:{fleet.port}"
        async with clients(address) as found, clients(address) as others:
            calls = await begun(found, 16)
            one, other = {each.peer for each in triton.generations}
            before = dict(fleet.pids)
            os.kill(before[1], signal.SIGKILL)
            await until(lambda: 0 in (of(triton, one), of(triton, other)))
            # The other worker's go on, and in place of the lost ones others run.
            left = running(triton)
            assert 0 < left < 16
            waiting = [asyncio.create_task(each.generate(prompt="Hi")) for each in others]
            await until(lambda: running(triton) == 16)
            await until(lambda: fleet.pids.get(1) not in (None, before[1]))
            assert fleet.pids[2] == before[2]
            assert running(triton) == 16
            for task in waiting:
                task.cancel()
            for call in calls:
                call.cancel()
            # What one of them is ordered holds for all, and for who is started later.
            await found[0].admin.DrainReplica(admin_pb2.DrainReplicaRequest(address=triton.target))
        os.kill(before[2], signal.SIGKILL)
        await until(lambda: fleet.pids.get(2) not in (None, before[2]))
        async with clients(address, serving=False) as again:
            for each in again:
                state = (await each.replicas())[triton.target].state
                assert state == admin_pb2.REPLICA_STATE_DRAINING


async def test_a_worker_that_does_not_answer_is_replaced(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    limits = FleetLimits(look_interval_s=0.1, answer_timeout_s=4.0)
    async with running_fleet(triton.target, limits=limits) as fleet:
        before = dict(fleet.pids)
        os.kill(before[1], signal.SIGSTOP)
        await until(lambda: fleet.pids.get(1) not in (None, before[1]))
        assert not runs(before[1])
        assert fleet.pids[2] == before[2]
    assert "worker 1 did not answer within 4 s, and is killed" in caplog.messages


async def test_a_drain_cuts_nothing(triton: FakeTriton) -> None:
    triton.default = slow(100)
    async with (
        running_fleet(triton.target, max_connection_age_s=0.5) as fleet,
        clients(f"127.0.0.1:{fleet.port}", 8) as found,
    ):
        pids = list(fleet.pids.values())
        streams = [asyncio.create_task(each.generate(prompt="Hi")) for each in found]
        await triton.wait_for(lambda: len(triton.generations) == 8)
        # Their connections have grown too old by then, and new ones serve what is new.
        await asyncio.sleep(1.0)
        assert (await found[0].get_model()).name == MODEL
        draining = asyncio.create_task(fleet.drain(60))
        outcomes: list[Outcome] = await asyncio.gather(*streams)
        assert {each.code for each in outcomes} == {grpc.StatusCode.OK}
        assert {each.text for each in outcomes} == {"".join(f"{n} " for n in range(100))}
        await draining
        assert not any(runs(pid) for pid in pids)


async def test_an_order_to_drain_reaches_all(triton: FakeTriton) -> None:
    triton.default = ENDLESS
    async with (
        running_fleet(triton.target) as fleet,
        clients(f"127.0.0.1:{fleet.port}") as found,
    ):
        calls = await begun(found, 4)
        answer = await found[0].admin.Drain(admin_pb2.DrainRequest())
        assert answer.generations == 4
        for each in found:
            assert await each.status() == 2  # NOT_SERVING
            assert (await each.generate(prompt="Hi")).code is grpc.StatusCode.UNAVAILABLE
        assert running(triton) == 4
        assert await fleet.tell(RefuseNew()) == 4
        for call in calls:
            call.cancel()


async def test_what_keeps_workers_from_starting_is_one_clear_error(
    triton: FakeTriton, tmp_path: Path
) -> None:
    with pytest.raises(DraftgateError, match="tokenizer") as caught:
        async with running_fleet(triton.target, tokenizer_dir=tmp_path):
            pass
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    nothing = Fleet(GatewayConfig(triton.target, MODEL, listen="127.0.0.1:0"), 2, ("/nowhere",),
                    log_settings={})  # fmt: skip
    with pytest.raises(DraftgateError, match="cannot start a worker: No such file"):
        await nothing.start()
    ending = Fleet(GatewayConfig(triton.target, MODEL, listen="127.0.0.1:0"), 2, ("true",),
                   log_settings={})  # fmt: skip
    with pytest.raises(DraftgateError, match="ended before it listened"):
        await ending.start()
    with pytest.raises(DraftgateError, match="is not running"):
        _ = ending.port
