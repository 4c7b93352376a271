"""The processes that `gateway_overhead.py` starts: a scripted Triton, a bare relay, the gateway.

    python benchmarks/overhead_servers.py backend
    python benchmarks/overhead_servers.py relay TRITON
    python benchmarks/overhead_servers.py gateway TRITON BUSY_CHUNKS_PER_S MAX_DELAY_MS

Each prints the port that it listens on, and ends when its standard input does. All of them run on
the event loop that `draftgate gateway` runs on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import uvloop
from google.protobuf.wrappers_pb2 import StringValue
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference import grpc_service_pb2_grpc
from draftgate.contract import DataType, GateReason, TensorSpec
from draftgate.gateway import Gateway, GatewayConfig
from draftgate.upstream.coalescing import CoalescingConfig

__all__ = ["MODEL", "RELAY_METHOD", "prompt", "text_of", "triton_request"]

MODEL = "scripted"
RELAY_METHOD = "/bare.Relay/Generate"

_DESCRIPTION = {
    "name": MODEL,
    "architecture": "scripted",
    "quantization": "",
    "compute_dtype": "",
    "vocab_size": 1 << 20,
    "max_sequence_tokens": 1 << 20,
    "eos_token_ids": [],
    "has_chat_template": False,
    "drafter": "scripted",
    "max_draft_len": 4,
    "max_batch_rows": 4096,
}
_CODES = {DataType.INT32: "i", DataType.INT64: "q", DataType.FP32: "f"}
_OUTPUT_INDEX = {spec.name: index for index, spec in enumerate(contract.ENSEMBLE_OUTPUTS)}


def prompt(interval_ms: float, draft_len: int = 0) -> str:
    """What makes the backend send the time, in nanoseconds, so often; 0: once, and then nothing.
    draft_len: of each step; all drafts but one are accepted."""
    return f"{interval_ms} {draft_len}"


def triton_request(text: str, request_id: str) -> pb.ModelInferRequest:
    """The least that asks the backend for a generation."""
    request = pb.ModelInferRequest(model_name=contract.ENSEMBLE_MODEL, id=request_id)
    for name, datatype, content in (
        ("text_input", "BYTES", _string(text)),
        ("max_tokens", "INT32", struct.pack("<i", 1 << 19)),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(content)
    return request


def text_of(response: pb.ModelStreamInferResponse) -> str:
    """The text of a response, read in the shortest way."""
    answer = response.infer_response
    for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True):
        if output.name == "text_output":
            return content[4:].decode()
    return ""


class _Backend(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """What the gateway asks of a Triton with the `draftgate` models, as cheap as it can be had."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:  # noqa: N802
        """Here: whether nothing runs. The gateway does not ask."""
        return pb.ServerLiveResponse(live=not self._running)

    async def ServerReady(self, request: Any, context: Any) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:  # noqa: N802
        return pb.ModelReadyResponse(ready=True)

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: Any
    ) -> pb.ModelConfigResponse:
        if request.name not in contract.MODELS:
            await context.abort(grpc.StatusCode.NOT_FOUND, request.name)
        inputs, outputs = contract.MODELS[request.name]
        answer = pb.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.input.extend(
            pb.ModelInput(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
            for spec in inputs
        )
        answer.config.output.extend(
            pb.ModelOutput(name=spec.name, data_type=_data_type(spec), dims=spec.dims)
            for spec in outputs
        )
        return answer

    async def ModelStreamInfer(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> None:
        async for request in request_iterator:
            given = {
                tensor.name: content
                for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
            }
            if contract.CONTROL in given:
                answer = {contract.CONTROL_RESULT: json.dumps(_DESCRIPTION)}
                await context.write(_response(contract.ENGINE_OUTPUTS, request.id, answer))
            elif contract.STOP in given:
                if request.id in self._running:
                    self._running[request.id].cancel()
            else:
                await self._generate(request.id, given["text_input"][4:].decode(), context.write)

    async def _generate(
        self, request_id: str, text: str, write: Callable[[Any], Awaitable[None]]
    ) -> None:
        sending = asyncio.create_task(_send(request_id, text, write))
        self._running[request_id] = sending
        try:
            await asyncio.wait({sending})  # A stop cancels it alone, the end of the RPC this.
        finally:
            del self._running[request_id]
            sending.cancel()


async def _send(request_id: str, text: str, write: Callable[[Any], Awaitable[None]]) -> None:
    interval_ms, draft_len = text.split()
    interval_s, tokens = float(interval_ms) / 1000, max(1, int(draft_len))
    values: dict[str, Any] = {
        "output_ids": [1000] * tokens,
        "chunk_index": 0,
        "gate_reason": int(GateReason.GAIN if tokens > 1 else GateReason.COMPUTE_BOUND),
        "batch_rows": 64,
        "finish_reason": "",
        "text_output": "",
    }
    if tokens > 1:
        values |= {"draft_lens": [tokens], "accepted_lens": [tokens - 1], "draft_source": [1]}
    first = {"prompt_len": 8, "cached_len": 0, "queue_us": 10, "prefill_us": 100}
    message = _response(contract.ENSEMBLE_OUTPUTS, request_id, values | first)
    index, due_s = 0, time.monotonic()
    while True:
        contents = message.infer_response.raw_output_contents
        contents[_OUTPUT_INDEX["chunk_index"]] = struct.pack("<i", index)
        contents[_OUTPUT_INDEX["text_output"]] = _string(f"{time.monotonic_ns()} ")
        await write(message)
        if not index:
            message = _response(contract.ENSEMBLE_OUTPUTS, request_id, values)
        if not interval_s:
            await asyncio.get_running_loop().create_future()
        index += 1
        due_s += interval_s
        await asyncio.sleep(due_s - time.monotonic())


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and forgets them."""

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def _backend() -> AsyncIterator[int]:
    server = _server()
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Backend(), server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Collector(), server)
    async with _listening(server) as port:
        yield port


@asynccontextmanager
async def _relay(triton: str) -> AsyncIterator[int]:
    """The least that makes a server stream of text out of Triton's: one message in, one out."""
    async with grpc.aio.insecure_channel(triton) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def generate(request: StringValue, context: Any) -> None:
            call = stub.ModelStreamInfer()
            try:
                await call.write(triton_request(request.value, f"relayed-{id(call)}"))
                await call.done_writing()
                async for response in call:
                    await context.write(StringValue(value=text_of(response)))
            finally:
                call.cancel()

        server = _server()
        service, method = RELAY_METHOD.strip("/").split("/")
        handler = grpc.unary_stream_rpc_method_handler(
            generate, StringValue.FromString, StringValue.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        async with _listening(server) as port:
            yield port


@asynccontextmanager
async def _gateway(triton: str, busy_chunks_per_s: str, max_delay_ms: str) -> AsyncIterator[int]:
    """With all that is on by itself, and with traces of every call."""
    config = GatewayConfig(
        triton_target=triton,
        model_name=MODEL,
        listen="127.0.0.1:0",
        otlp_endpoint=triton,
        coalescing=CoalescingConfig(float(busy_chunks_per_s), float(max_delay_ms)),
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        yield gateway.port
    finally:
        await gateway.drain(0.0)


def _server() -> grpc.aio.Server:
    return grpc.aio.server(options=[("grpc.so_reuseport", 0)])


@asynccontextmanager
async def _listening(server: grpc.aio.Server) -> AsyncIterator[int]:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def _response(
    specs: tuple[TensorSpec, ...], request_id: str, values: Mapping[str, Any]
) -> pb.ModelStreamInferResponse:
    """With every output, as Triton sends it: those without a value are empty."""
    message = pb.ModelStreamInferResponse()
    answer = message.infer_response
    answer.model_name, answer.model_version, answer.id = contract.ENSEMBLE_MODEL, "1", request_id
    answer.parameters["triton_final_response"].bool_param = False
    for spec in specs:
        value = values.get(spec.name, [])
        if isinstance(value, str):
            count, content = 1, _string(value)
        else:
            elements = value if isinstance(value, list) else [value]
            count = len(elements)
            content = struct.pack(f"<{count}{_CODES.get(spec.dtype, 'i')}", *elements)
        answer.outputs.add(name=spec.name, datatype=spec.dtype.value, shape=[count])
        answer.raw_output_contents.append(content)
    return message


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<I", len(content)) + content


def _data_type(spec: TensorSpec) -> pb.DataType.ValueType:
    return pb.DataType.Value(f"TYPE_{spec.dtype.name}")


_KINDS: Mapping[str, Callable[..., Any]] = {
    "backend": _backend,
    "relay": _relay,
    "gateway": _gateway,
}


async def _run(kind: str, *arguments: str) -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_KINDS[kind](*arguments))
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    # Where a thousand streams are left at once, some end late, and that is said of each.
    logging.disable(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(*sys.argv[1:]))
