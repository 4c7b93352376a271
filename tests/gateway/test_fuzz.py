"""Whatever is sent to whatever method: no crash, no status that means one, and nothing left.

A failure names the number of its request; the same seed makes the same requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway import Gateway
from draftgate.gateway.auth import SecurityConfig
from tests.fakes.triton import DESCRIPTION, FakeTriton, Received, Script, Step, words
from tests.support.fuzzer import Fuzzer
from tests.support.gateway import MODEL, Client, connected, running_gateway
from tests.support.good_requests import WORDS, good_requests
from tests.support.holdings import at_rest, settled
from tests.support.process_memory import resident_bytes
from tests.support.reflected import Method, reflected_methods
from tests.support.rude import RudeClient
from tests.support.tenants import TenantsFile

SEED = 20260214
GOOD = good_requests()
NO_WAY_BACK = "/draftgate.v1.AdminService/Drain"
"""It would leave nothing to call; it has a test of its own."""

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.01)], endless=True)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """One of the methods sets it."""
    logger = logging.getLogger("draftgate")
    level = logger.level
    yield
    logger.setLevel(level)


@asynccontextmanager
async def attacked(triton: FakeTriton, **config: object) -> AsyncIterator[tuple[Gateway, Client]]:
    """A gateway whose model server now and then takes long."""

    def script(received: Received) -> Script:
        return ENDLESS if len(triton.generations) % 3 == 0 else words("Hello", " world")

    triton.script_for = script
    triton.description = {**DESCRIPTION, "max_batch_rows": 64}
    async with (
        running_gateway(triton.target, probe_interval_s=1.0, **config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield gateway, client


async def attack(
    client: Client, gateway: Gateway, methods: Sequence[Method], count: int, seed: int = SEED
) -> Fuzzer:
    fuzzer = Fuzzer(methods, GOOD, (MODEL, *WORDS), seed)
    async with connected(gateway) as first, connected(gateway) as second:
        await fuzzer.run([first.channel, second.channel], count)
    return fuzzer


def crashes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


async def still_good(triton: FakeTriton, client: Client) -> None:
    triton.script_for = None
    outcome = await client.generate(prompt="Hi")
    assert (outcome.code, outcome.text) == (grpc.StatusCode.OK, "Hello world"), outcome.message


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
async def test_no_request_breaks_the_gateway(
    triton: FakeTriton, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    async with attacked(triton, tokenizer_dir=checkpoint_dir) as (gateway, client):
        every = await reflected_methods(client.channel)
        methods = [method for method in every if method.path != NO_WAY_BACK]
        assert len(methods) == len(every) - 1
        # What is made once, at the first call of a kind, is not left behind by it.
        await attack(client, gateway, methods, 200, seed=1)
        before = await at_rest()
        used_bytes = resident_bytes()
        fuzzer = await attack(client, gateway, methods, count)
        assert fuzzer.wrong == []
        # Most of it was refused, and some of it went all the way.
        assert all(fuzzer.codes[f"{name} OK"] for name in ("Generate", "GenerateOnce", "Session"))
        assert fuzzer.codes["Generate INVALID_ARGUMENT"] > fuzzer.codes["Generate OK"]
        assert crashes(caplog) == []
        await settled(before)
        assert resident_bytes() - used_bytes < 64 << 20
        [replica] = (await client.replicas()).values()
        assert (replica.generations, replica.outstanding_tokens) == (0, 0)
        await still_good(triton, client)
    assert crashes(caplog) == []


async def test_no_request_without_credentials_gets_further_than_that(
    triton: FakeTriton, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme")
    config = SecurityConfig(tenants_file=tenants.path)
    async with attacked(triton, security=config) as (gateway, client):
        every = await reflected_methods(client.channel)
        ours = [each for each in every if not each.service.startswith("grpc.")]
        fuzzer = await attack(client, gateway, ours, 400)
        assert fuzzer.wrong == []
        given = {name.partition(" ")[2] for name in fuzzer.codes}
        # The last is for headers that are larger than may be.
        assert given <= {"UNAUTHENTICATED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
        assert triton.generations == []
        triton.script_for = None
        outcome = await client.generate(prompt="Hi", metadata=[("authorization", f"Bearer {key}")])
        assert outcome.text == "Hello world"
    assert crashes(caplog) == []


async def test_a_drain_that_is_asked_for_badly(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that are no request drain nothing; what is one, drains, and the rest is refused."""
    async with attacked(triton) as (gateway, client):
        every = await reflected_methods(client.channel)
        [drain] = [each for each in every if each.path == NO_WAY_BACK]
        call = client.channel.unary_unary(drain.path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await still_good(triton, client)
        fuzzer = await attack(client, gateway, [drain], 40)
        assert fuzzer.wrong == []
        await attack(client, gateway, every, 200)
        assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.UNAVAILABLE
    assert crashes(caplog) == []


NO_CALLS = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) * 2000,  # empty frames
    b"PRI * HT",
    bytes(range(256)) * 100,
)


async def test_bytes_that_are_no_call(triton: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    async with attacked(triton) as (gateway, client):
        before = await at_rest()
        for content in NO_CALLS * 20:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(content)
            await asyncio.sleep(0.002)
            writer.transport.abort()
        await settled(before)
        await still_good(triton, client)
    assert crashes(caplog) == []


NO_METHODS: tuple[str | bytes, ...] = (
    *("", "/", "//", "*", "/a", "/a/b/c", "/" + "x" * 10_000, "http://localhost/a/b"),
    *("/draftgate.v1.GenerationService/", "/draftgate.v1.GenerationService/Generate "),
    *("/draftgate.v1.GenerationService/generate", "/grpc.health.v1.Health/Watch\0"),
    # No text at all, which is more than grpc.aio takes.
    *(b"/\xff\xfe/\xff", b"/draftgate.v1.GenerationService/\xe9"),
)


async def test_methods_that_there_are_not(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked(triton) as (gateway, client):
        before = await at_rest()
        for path in NO_METHODS * 3:
            rude = await RudeClient.connect(gateway.port)
            rude.call(path, [pb.GenerateRequest(prompt="Hi")])
            with suppress(EOFError):
                async with asyncio.timeout(10):
                    await rude.message()
            rude.vanish()
        await settled(before)
        await still_good(triton, client)
    assert crashes(caplog) == []
