"""A Triton whose engine is a script: so many rows, and for each of them a token at every step.

    python benchmarks/scripted_triton.py ROWS STEP_MS

It speaks what the gateway asks of a Triton with the `draftgate` models, and costs next to nothing.
It also takes spans, and forgets them. Prints the port that it listens on, and ends when its
standard input does.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
import uvloop
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.contract import FinishReason, GateReason

__all__ = ["MODEL", "Row", "ScriptedEngine", "ScriptedTriton"]

MODEL = "scripted"

_SERVICE = "inference.GRPCInferenceService"
_MODELS = {
    contract.ENSEMBLE_MODEL: (contract.ENSEMBLE_INPUTS, contract.ENSEMBLE_OUTPUTS),
    contract.ENGINE_MODEL: (contract.ENGINE_INPUTS, contract.ENGINE_OUTPUTS),
}
_CODES = {contract.DataType.INT32: "i", contract.DataType.INT64: "q"}


@dataclass(eq=False)
class Row:
    """One generation in the engine."""

    tokens: int
    """Those that it is to emit."""
    due: int = 0
    """Those that it has emitted."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def cut(self) -> None:
        """Emit no more."""
        self.tokens = self.due
        self.changed.set()


class ScriptedEngine:
    """Steps at a fixed pace, whatever the load; rows that find no place wait in order."""

    def __init__(self, rows: int, step_s: float) -> None:
        self.rows = rows
        self._step_s = step_s
        self._running: set[Row] = set()
        self._waiting: deque[Row] = deque()

    def enter(self, row: Row) -> None:
        """Begin when there is a place."""
        self._waiting.append(row)

    def leave(self, row: Row) -> None:
        """Give the place back, or the place in the queue."""
        self._running.discard(row)
        if row in self._waiting:
            self._waiting.remove(row)

    def step(self) -> None:
        """Emit a token of every row."""
        while self._waiting and len(self._running) < self.rows:
            self._running.add(self._waiting.popleft())
        for row in tuple(self._running):
            row.due += 1
            row.changed.set()
            if row.due >= row.tokens:
                self._running.discard(row)

    async def run(self) -> None:
        """Step until cancelled. Steps that come late are made up for."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += self._step_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self.step()


class ScriptedTriton(grpc.GenericRpcHandler):
    """The protocol in front of an engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._rows: dict[str, Row] = {}
        unary = {
            "ServerReady": (pb.ServerReadyRequest, self._server_ready),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
        }
        self._methods = {
            f"/{_SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
                method, request.FromString, lambda answer: answer.SerializeToString()
            )
            for name, (request, method) in unary.items()
        }
        # What is sent is bytes already: tokens differ in nothing but their number.
        self._methods[f"/{_SERVICE}/ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream_infer, pb.ModelInferRequest.FromString
        )

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method."""
        return self._methods.get(handler_call_details.method)

    async def _server_ready(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=True)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=True)

    async def _model_config(self, request: Any, context: Any) -> Any:
        if request.name not in _MODELS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {request.name}")
        config = pb.ModelConfig(name=request.name)
        for specs, tensors in zip(
            _MODELS[request.name], (config.input, config.output), strict=True
        ):
            for spec in specs:
                data_type = pb.DataType.Value(f"TYPE_{spec.dtype.name}")
                tensors.add(name=spec.name, data_type=data_type, dims=spec.dims)
        return pb.ModelConfigResponse(config=config)

    async def _stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> None:
        async for request in requests:
            names = [tensor.name for tensor in request.inputs]
            given = dict(zip(names, request.raw_input_contents, strict=True))
            if contract.CONTROL in given:
                await context.write(_description(self._engine.rows))
            elif contract.STOP not in given:
                (tokens,) = struct.unpack("<i", given["max_tokens"])
                await self._generate(request.id, tokens, context)
            elif request.id in self._rows:
                self._rows[request.id].cut()

    async def _generate(self, request_id: str, tokens: int, context: Any) -> None:
        row = self._rows[request_id] = Row(tokens)
        self._engine.enter(row)
        sent = 0
        try:
            while sent < row.tokens:
                while sent < row.due:
                    sent += 1
                    await context.write(_token(sent - 1, last=sent == tokens))
                row.changed.clear()
                if sent < row.tokens and sent == row.due:
                    await row.changed.wait()
            if sent < tokens:
                await context.write(_end(sent))
        finally:
            self._engine.leave(row)
            del self._rows[request_id]


@lru_cache(maxsize=4096)
def _token(index: int, *, last: bool) -> bytes:
    values = {
        "output_ids": 100 + index % 100,
        "text_output": f"{index} ",
        "finish_reason": FinishReason.LENGTH.value if last else "",
    }
    first = {"prompt_len": 1, "cached_len": 0, "queue_us": 0, "prefill_us": 0}
    return _chunk(index, values if index else {**values, **first})


def _end(index: int) -> bytes:
    return _chunk(index, {"finish_reason": FinishReason.CANCELLED.value})


def _chunk(index: int, values: dict[str, int | str]) -> bytes:
    shared = {"chunk_index": index, "gate_reason": int(GateReason.DISABLED), "batch_rows": 1}
    return _response(contract.ENSEMBLE_OUTPUTS, {**shared, **values})


def _description(rows: int) -> bytes:
    fields = {
        "name": MODEL,
        "architecture": "",
        "quantization": "",
        "compute_dtype": "",
        "vocab_size": 1000,
        "max_sequence_tokens": 1 << 16,
        "eos_token_ids": [],
        "has_chat_template": False,
        "drafter": "",
        "max_draft_len": 0,
        "max_batch_rows": rows,
    }
    return _response(contract.ENGINE_OUTPUTS, {contract.CONTROL_RESULT: json.dumps(fields)})


def _response(specs: tuple[contract.TensorSpec, ...], values: dict[str, int | str]) -> bytes:
    """With every output, as the models send it: those without a value are empty."""
    message = pb.ModelStreamInferResponse()
    for spec in specs:
        value = values.get(spec.name)
        content = b""
        if isinstance(value, str):
            text = value.encode()
            content = struct.pack("<I", len(text)) + text
        elif value is not None:
            content = struct.pack(f"<{_CODES[spec.dtype]}", value)
        shape = [0 if value is None else 1]
        message.infer_response.outputs.add(name=spec.name, datatype=spec.dtype.value, shape=shape)
        message.infer_response.raw_output_contents.append(content)
    return message.SerializeToString()


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return trace_service_pb2.ExportTraceServiceResponse()


async def _serve(rows: int, step_ms: float) -> None:
    engine = ScriptedEngine(rows, step_ms / 1e3)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((ScriptedTriton(engine),))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    stepping = asyncio.create_task(engine.run())
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        stepping.cancel()
        await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
