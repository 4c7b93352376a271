"""What a running gateway takes up, and what it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import tokenizer_pb2
from draftgate.errors import DraftgateError
from draftgate.gateway import Gateway
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from draftgate.gateway.config import RequestRules
from draftgate.gateway.defaults import RequestDefaults
from draftgate.gateway.orders import Reload
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.certificates import Authority
from tests.support.gateway import Client, connected, running_gateway
from tests.support.session import SessionCall
from tests.support.tenants import TenantsFile

RULES = RequestRules(
    defaults=RequestDefaults(max_tokens=7, temperature=0.5),
    max_output_tokens=10,
    max_prompt_tokens=20,
    max_prompt_bytes=30,
    max_messages=2,
    max_choices=3,
)


async def told(client: Client) -> tuple[int, float, int, int, int, int, int]:
    """The rules as the gateway tells them."""
    model = await client.get_model()
    limits = model.limits
    return (
        model.defaults.max_tokens,
        model.defaults.sampling.temperature,
        limits.max_output_tokens,
        limits.max_prompt_tokens,
        limits.max_prompt_bytes,
        limits.max_messages,
        limits.max_choices,
    )


async def test_new_rules_hold_for_what_comes_and_not_for_what_runs(
    gateway: Gateway, client: Client, triton: FakeTriton
) -> None:
    session = SessionCall(client)
    await session.start("before")
    await session.until_ended("before")
    triton.default = Script([Step({"output_ids": [n]}, delay_s=0.02) for n in range(20)])
    running = asyncio.create_task(client.generate(prompt="x" * 40, max_tokens=20))
    await triton.wait_for(lambda: len(triton.generations) == 2)
    await gateway.tell(Reload(rules=RULES))
    assert await told(client) == (7, 0.5, 10, 20, 30, 2, 3)

    message = pb.ChatMessage(role="user", content="x")
    refused: dict[str, dict[str, Any]] = {
        "max_tokens": {"prompt": "Hi", "max_tokens": 11},
        "prompt": {"prompt": "x" * 31},
        "messages": {"messages": [message] * 3},
        "n": {"prompt": "Hi", "n": 4},
    }
    for field, request in refused.items():
        outcome = await client.generate(**request)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
        assert outcome.bad_fields == [field]
    with pytest.raises(grpc.aio.AioRpcError, match="max_tokens: got 11"):
        await client.generate_once(prompt="Hi", max_tokens=11)
    await session.start("after", max_tokens=11)
    await session.until(lambda: bool(session.refused))
    assert "max_tokens: got 11, allowed: an integer from 1 to 10" in session.refused[0][1].message
    await session.finish()

    assert (await client.generate(prompt="Hi")).error is None
    sent = triton.generations[-1].tensors
    assert (sent["max_tokens"], sent["temperature"]) == ([7], [0.5])
    # What ran has all of what it was let in with.
    outcome = await running
    assert outcome.code is grpc.StatusCode.OK
    assert len(outcome.tokens) == 20


async def test_tokenizing_has_the_new_limits_too(triton: FakeTriton, tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "model")
    async with (
        running_gateway(triton.target, tokenizer_dir=folder) as gateway,
        connected(gateway) as client,
    ):
        request = tokenizer_pb2.TokenizeRequest(prompt="x" * 31)
        assert len((await client.tokenizer.Tokenize(request)).ids) == 31
        await gateway.tell(Reload(rules=RULES))
        with pytest.raises(grpc.aio.AioRpcError, match="at most 30 bytes"):
            await client.tokenizer.Tokenize(request)


async def test_the_models_own_defaults_are_read_again(triton: FakeTriton, tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "model")
    own = folder / "generation_config.json"
    rules = replace(RULES, defaults=RequestDefaults(temperature=0.5, generation_config=True))
    async with (
        running_gateway(triton.target, tokenizer_dir=folder) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        own.write_text('{"max_new_tokens": 9}')
        await gateway.tell(Reload(rules=rules))
        assert (await told(client))[:2] == (9, 0.5)
        own.write_text('{"max_new_tokens": "many"}')
        with pytest.raises(DraftgateError, match="max_tokens is no such number"):
            await gateway.tell(Reload(rules=replace(rules, max_choices=4)))
        assert (await told(client))[-1] == 3


@pytest.mark.parametrize("broken", ["certificate", "tenants"])
async def test_what_is_of_no_use_changes_nothing(
    triton: FakeTriton, tmp_path: Path, broken: str
) -> None:
    authority, cert, key = Authority(), tmp_path / "a.crt", tmp_path / "a.key"
    authority.issue("server").write(cert, key)
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    old = tenants.add("acme")
    security = SecurityConfig(
        tls=TlsConfig(cert, key), tenants_file=tenants.path, reload_interval_s=3600
    )
    trusting = grpc.ssl_channel_credentials(authority.certificate)
    async with (
        running_gateway(triton.target, security=security) as gateway,
        grpc.aio.secure_channel(gateway.address, trusting) as channel,
    ):
        client = Client(channel)
        await client.wait_serving()

        async def code(credentials: str) -> grpc.StatusCode:
            outcome = await client.generate(prompt="Hi", metadata=[("x-api-key", credentials)])
            return outcome.code

        before = gateway.config
        tenants.remove("acme")
        new = tenants.add("other")
        damaged = {"certificate": cert, "tenants": tenants.path}[broken]
        whole = damaged.read_bytes()
        damaged.write_text("{")
        order = Reload(AdmissionConfig(max_concurrency=0), RULES)
        with pytest.raises(DraftgateError, match=damaged.name):
            await gateway.tell(order)
        assert gateway.config == before
        assert await code(old) is grpc.StatusCode.OK
        assert await code(new) is grpc.StatusCode.UNAUTHENTICATED

        damaged.write_bytes(whole)
        await gateway.tell(Reload(rules=RULES))
        assert RequestRules.of(gateway.config) == RULES
        assert await code(new) is grpc.StatusCode.OK
        assert await code(old) is grpc.StatusCode.UNAUTHENTICATED
