"""Starting, describing itself, draining."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import Gateway, GatewayConfig
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.listen import HeldPort, bind, check_listen
from draftgate.gateway.orders import Reload
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import MODEL, Client, connected, running_gateway
from tests.support.reflected import SERVICES


async def test_the_model_is_described(client: Client) -> None:
    for name in ("", MODEL):
        model = await client.get_model(name)
        assert (model.name, model.architecture) == (MODEL, "LlamaForCausalLM")
        assert (model.quantization, model.compute_dtype) == ("FP8", "float32")
        assert (model.vocab_size, model.max_sequence_tokens) == (1000, 512)
        assert list(model.eos_token_ids) == [2]
        assert model.has_chat_template
        assert (model.drafter, model.max_draft_len, model.max_batch_rows) == ("ngram", 4, 8)


async def test_reflection_lists_every_service(client: Client) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    listed = {service.name for service in answer.list_services_response.service}
    assert listed == set(SERVICES)
    call = stub.ServerReflectionInfo()
    symbol = "draftgate.v1.GenerationService"
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
    answer = await call.read()
    await call.done_writing()
    assert answer.file_descriptor_response.file_descriptor_proto


async def test_a_port_in_use_is_one_clear_error(gateway: Gateway, triton: FakeTriton) -> None:
    second = Gateway(
        GatewayConfig(
            triton_target=triton.target, model_name=MODEL, listen=f"127.0.0.1:{gateway.port}"
        )
    )
    with pytest.raises(DraftgateError, match=f"port {gateway.port} is in use") as caught:
        await second.start()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


async def test_a_port_taken_by_another_program_is_too(triton: FakeTriton) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        gateway = Gateway(
            GatewayConfig(triton_target=triton.target, model_name=MODEL, listen=listen)
        )
        with pytest.raises(DraftgateError, match="is in use"):
            await gateway.start()


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "nonsense", "192.0.2.1:0"])
async def test_an_unusable_address_is_one_clear_error(triton: FakeTriton, listen: str) -> None:
    gateway = Gateway(GatewayConfig(triton_target=triton.target, model_name=MODEL, listen=listen))
    with pytest.raises(DraftgateError, match=f"cannot listen on {listen}: ."):
        await gateway.start()


async def test_a_target_that_is_no_address_is_one_clear_error() -> None:
    gateway = Gateway(GatewayConfig(triton_target="127.0.0.1:1,nonsense", model_name=MODEL))
    with pytest.raises(DraftgateError, match="triton_target: got 'nonsense'") as caught:
        await gateway.start()
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


async def test_a_missing_tokenizer_is_one_clear_error(triton: FakeTriton, tmp_path: Path) -> None:
    gateway = Gateway(
        GatewayConfig(triton_target=triton.target, model_name=MODEL, tokenizer_dir=tmp_path)
    )
    with pytest.raises(DraftgateError) as caught:
        await gateway.start()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


async def test_a_gateway_that_did_not_start_has_no_port() -> None:
    gateway = Gateway(GatewayConfig(triton_target="127.0.0.1:1", model_name=MODEL))
    with pytest.raises(DraftgateError, match="is not running"):
        _ = gateway.port


async def test_a_drain_lets_streams_finish(triton: FakeTriton) -> None:
    triton.default = Script(
        [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s=0.02) for n in range(30)]
    )
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running = asyncio.create_task(client.generate(prompt="Hi"))
        await triton.wait_for(lambda: bool(triton.generations))
        draining = asyncio.create_task(gateway.drain(20.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = await client.generate(prompt="Hi")
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.message == "the server is shutting down"
        outcome = await running
        assert outcome.code is grpc.StatusCode.OK
        assert outcome.text == "".join(f"{n} " for n in range(30))
        await draining
        assert triton.stops == []


async def test_a_drain_cuts_what_does_not_finish(triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.01)], endless=True)
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        running = [asyncio.create_task(client.generate(prompt="Hi")) for _ in range(4)]
        await triton.wait_for(lambda: len(triton.generations) == 4)
        start_s = time.monotonic()
        await gateway.drain(0.2)
        assert time.monotonic() - start_s < 60  # bounded, not fast
        for outcome in await asyncio.gather(*running):
            assert outcome.code is grpc.StatusCode.UNAVAILABLE
            assert outcome.kinds[-1] == "finished"
            assert outcome.finished.finish_reason == pb.FINISH_REASON_UNSPECIFIED
            assert outcome.finished.usage.output_tokens == len(outcome.tokens) > 0
        assert sorted(triton.stops) == sorted(each.id for each in triton.generations)


async def test_a_drain_ends_though_nobody_reads(triton: FakeTriton) -> None:
    big = Step({"output_ids": [1], "text_output": "x" * 65536}, delay_s=0.002)
    triton.default = Script([big], endless=True)
    narrow = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))
    async with running_gateway(triton.target) as gateway, connected(gateway, *narrow) as client:
        await client.wait_serving()
        call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
        await call.read()
        async with asyncio.timeout(60):
            await gateway.drain(0.1)
        assert triton.stops == [triton.generations[0].id]


async def test_the_port_is_free_after_a_drain(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway:
        listen = f"127.0.0.1:{gateway.port}"
    async with running_gateway(triton.target, listen=listen) as again, connected(again) as client:
        await client.wait_serving()


async def test_draining_twice_does_no_harm(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway:
        await gateway.drain(0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_held_port_is_one_to_be_shared(triton: FakeTriton, host: str) -> None:
    held = HeldPort(f"{host}:0", secured=False)
    servers = [grpc.aio.server(options=(("grpc.so_reuseport", 1),)) for _ in range(2)]
    for server in servers:
        assert bind(server, held.listen, shared=True) == held.port
        await server.start()
    with pytest.raises(DraftgateError, match=f"port {held.port} is in use"):
        HeldPort(held.listen, secured=False)
    with pytest.raises(DraftgateError, match=f"port {held.port} is in use"):
        check_listen(held.listen, secured=False)
    for server in servers:
        await server.stop(None)
    held.close()
    HeldPort(held.listen, secured=False).close()


async def test_limits_can_be_reloaded(triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.01)], endless=True)
    config = AdmissionConfig(max_concurrency=1, max_waiting=1)
    async with (
        running_gateway(triton.target, admission=config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        calls = [client.generation.Generate(pb.GenerateRequest(prompt="Hi")) for _ in range(2)]
        await triton.wait_for(lambda: len(triton.generations) == 1)
        assert await gateway.tell(Reload(AdmissionConfig(max_concurrency=2, max_waiting=0))) == 1
        await triton.wait_for(lambda: len(triton.generations) == 2)
        full = await client.generate(prompt="Hi")
        assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
