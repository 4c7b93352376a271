"""A strict stand-in for a Triton server with the `draftgate` models.

It refuses what the real one would: unknown models and tensors, wrong data types and shapes, missing
inputs, reserved parameters, unary calls to decoupled models. What a generation answers is scripted.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference import grpc_service_pb2_grpc
from draftgate.contract import DataType, TensorSpec
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument, to_wire
from tests.fakes.gate import FakeGate

__all__ = ["DESCRIPTION", "FakeTriton", "Received", "Script", "Step", "words"]

DESCRIPTION: Mapping[str, Any] = {
    "name": "fake-135m",
    "architecture": "LlamaForCausalLM",
    "quantization": "FP8",
    "compute_dtype": "float32",
    "vocab_size": 1000,
    "max_sequence_tokens": 512,
    "eos_token_ids": [2],
    "has_chat_template": True,
    "drafter": "ngram",
    "max_draft_len": 4,
    "max_batch_rows": 8,
}
COUNTERS: Mapping[str, Any] = {
    "running_rows": 0,
    "waiting_rows": 0,
    "steps": 7,
    "rows_freed_cancelled": 0,
    "kv_used_blocks": 0,
    "kv_total_blocks": 64,
    "emitted_tokens": 9,
}

# What Triton's own parameters may be given as; other keys of its own are refused.
_PARAMETERS = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    "triton_enable_empty_final_response": ("bool_param",),
}
_CODES = {
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.UINT64: "Q",
    DataType.FP32: "f",
    DataType.BOOL: "?",
}


@dataclass(frozen=True)
class Step:
    """One response of a generation. Values are the contract's tensors by name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0
    """Wait before it is sent."""


@dataclass(frozen=True)
class Script:
    """What one generation answers."""

    steps: Sequence[Step] = ()
    endless: bool = False
    """Repeat the last step until stopped."""
    in_band_error: str = ""
    """Sent as text after the steps."""
    status: grpc.StatusCode | None = None
    """The RPC's status after the steps."""
    details: str = ""
    no_finish: bool = False
    """End the stream without a finish reason."""
    finish_reason: str = "length"
    deaf: bool = False
    """Ignore stop requests."""
    order: Sequence[int] | None = None
    """The order in which the chunks are delivered."""


@dataclass
class Received:
    """One request as it arrived."""

    id: str
    tensors: Mapping[str, Any]
    metadata: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    """The connection on which it came."""
    ended: str = ""
    """`finished`, `stopped`, `cancelled` (the RPC) or `failed`."""


def words(*texts: str, **shared: Any) -> Script:
    """One step per text, each with one token of the target."""
    return Script(
        [
            Step({"output_ids": [10 + index], "text_output": text, **shared})
            for index, text in enumerate(texts)
        ]
    )


class FakeTriton(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Listens on loopback between `start` and `stop`. Scripts go in order, then `default`."""

    def __init__(self) -> None:
        self.default = words("Hello", " world")
        self.scripts: list[Script] = []
        self.script_for: Callable[[Received], Script] | None = None
        self.description: Mapping[str, Any] = DESCRIPTION
        self.server_ready = True
        self.not_ready_models: set[str] = set()
        self.generations: list[Received] = []
        self.inferred: list[Received] = []
        """By calls with one response."""
        self.infer_script = Script()
        """What those do before they answer."""
        self.statistics = pb.ModelStatisticsResponse()
        self.stops: list[str] = []
        self.refuse_stops = False
        self.gate = FakeGate()
        self.target = ""
        self._stopped: dict[str, asyncio.Event] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0, *, max_streams: int | None = None) -> None:
        """max_streams: how many calls it takes at once on one connection."""
        options = [("grpc.so_reuseport", 0)]
        if max_streams is not None:
            options.append(("grpc.max_concurrent_streams", max_streams))
        self._server = grpc.aio.server(options=options)
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.target = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something happened here."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    # What the server answers.

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=self.server_ready)

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: Any
    ) -> pb.ModelReadyResponse:
        if request.name not in contract.MODELS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown: {request.name}")
        return pb.ModelReadyResponse(ready=request.name not in self.not_ready_models)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: Any
    ) -> pb.ModelConfigResponse:
        if request.name not in contract.MODELS:
            message = f"Request for unknown model: '{request.name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        inputs, outputs = contract.MODELS[request.name]
        config = pb.ModelConfig(name=request.name)
        for spec in inputs:
            config.input.add(
                name=spec.name, data_type=_config_type(spec), dims=spec.dims, optional=spec.optional
            )
        for spec in outputs:
            config.output.add(name=spec.name, data_type=_config_type(spec), dims=spec.dims)
        return pb.ModelConfigResponse(config=config)

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(name=request.name, versions=["1"])

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: Any
    ) -> pb.ModelStatisticsResponse:
        if not self.statistics.model_stats and not request.name:
            # Of models that were never asked anything it tells the names.
            names = (pb.ModelStatistics(name=name, version="1") for name in contract.MODELS)
            return pb.ModelStatisticsResponse(model_stats=names)
        return self.statistics

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        """Of `preprocessing`, which here takes every byte for a token."""
        if request.model_name != contract.PREPROCESSING_MODEL:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
            )
        if problem := _refusal(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        received = _received(request, context)
        self.inferred.append(received)
        for step in self.infer_script.steps:
            await asyncio.sleep(step.delay_s)
        if self.infer_script.status is not None:
            await context.abort(self.infer_script.status, self.infer_script.details)
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        (spec,) = contract.PREPROCESSING_OUTPUTS
        content, count = _encode(spec, list(received.tensors["text_input"].encode()))
        response.outputs.add(name=spec.name, datatype=spec.dtype.value, shape=[count])
        response.raw_output_contents.append(content)
        return response

    async def ModelStreamInfer(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> None:
        requests = []
        async for request in request_iterator:
            requests.append(request)
            if len(requests) == 1:
                answering = asyncio.ensure_future(self._answer(request, context))
                # An abort may end the reading here before anybody awaits it.
                answering.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not requests:
            return  # It was left before it began.
        assert len(requests) == 1, "one request per stream, then half-close"
        try:
            await answering
        finally:
            answering.cancel()

    async def _answer(self, request: pb.ModelInferRequest, context: Any) -> None:
        problem = _refusal(request)
        if problem:
            message = pb.ModelStreamInferResponse(error_message=problem)
            message.infer_response.id = request.id
            await context.write(message)
            return
        try:
            tensors = _decode(request)
        except DraftgateError as error:
            await context.write(_failure(request.id, error))
            return
        if request.model_name == contract.ENSEMBLE_MODEL:
            await self._generate(_received(request, context), context)
        elif contract.STOP in tensors:
            await self._stop_generation(request.id, context)
        elif contract.CONTROL in tensors:
            await self._control(request, json.loads(tensors[contract.CONTROL]), context)
        elif request.model_name == contract.ENGINE_MODEL and "input_ids" in tensors:
            metadata = dict(context.invocation_metadata())
            await self._generate(Received(request.id, tensors, metadata), context, engine=True)
        else:
            error = DraftgateError(ErrorCode.UNIMPLEMENTED, f"{request.model_name} is not scripted")
            await context.write(_failure(request.id, error))

    async def _control(
        self, request: pb.ModelInferRequest, asked: dict[str, Any], context: Any
    ) -> None:
        plain = {"describe": self.description, "counters": COUNTERS}
        try:
            answer = (
                json.dumps(plain[asked["op"]]) if asked["op"] in plain else self.gate.control(asked)
            )
        except DraftgateError as error:
            await context.write(_failure(request.id, error))
            return
        result = {contract.CONTROL_RESULT: answer}
        await _send(context, request, contract.ENGINE_OUTPUTS, result, final=True)

    async def _stop_generation(self, wire_id: str, context: Any) -> None:
        if self.refuse_stops:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no stops today")
        self.stops.append(wire_id)
        # Like the engine's tombstones: a stop may come before its generation.
        self._stopped.setdefault(wire_id, asyncio.Event()).set()
        await context.write(_final(contract.ENGINE_MODEL, wire_id))

    async def _generate(self, received: Received, context: Any, *, engine: bool = False) -> None:
        """engine: it was entered straight, and tells ids alone."""
        self.generations.append(received)
        script = self.script_for(received) if self.script_for else self._next_script()
        try:
            await self._play(script, received, context, engine=engine)
        except asyncio.CancelledError:
            received.ended = "cancelled"
            raise

    async def _play(
        self, script: Script, received: Received, context: Any, *, engine: bool
    ) -> None:
        stopped = self._stopped.setdefault(received.id, asyncio.Event())
        model = contract.ENGINE_MODEL if engine else contract.ENSEMBLE_MODEL
        outputs = contract.MODELS[model][1]
        told = {spec.name for spec in outputs}
        request = pb.ModelInferRequest(model_name=model, id=received.id)
        index = 0
        async for values in _chunks(script, stopped):
            if engine:
                values = {name: each for name, each in values.items() if name in told}
            await _send(context, request, outputs, values, final=False)
            index += 1
        if stopped.is_set() and not script.deaf:
            received.ended = "stopped"
            end = {"chunk_index": index, "finish_reason": "cancelled"}
            await _send(context, request, outputs, end, final=False)
        elif script.in_band_error:
            received.ended = "failed"
            message = pb.ModelStreamInferResponse(error_message=script.in_band_error)
            message.infer_response.id = received.id
            await context.write(message)
        elif script.status is not None:
            received.ended = "failed"
            await context.abort(script.status, script.details)
        else:
            received.ended = "finished"
        await context.write(_final(model, received.id))

    def _next_script(self) -> Script:
        return self.scripts.pop(0) if self.scripts else self.default


async def _chunks(script: Script, stopped: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
    """The values of each response; ends early when stopped."""
    failing = bool(script.in_band_error or script.status or script.no_finish)
    steps = list(script.steps)
    for index in script.order or range(len(steps)):
        step = steps[index]
        if await _waited(step.delay_s, stopped, script):
            return
        last = index == len(steps) - 1 and not script.endless and not failing
        yield _completed(step, index, script.finish_reason if last else "")
    index = len(steps)
    while script.endless:
        if await _waited(steps[-1].delay_s, stopped, script):
            return
        yield _completed(steps[-1], index, "")
        index += 1


async def _waited(delay_s: float, stopped: asyncio.Event, script: Script) -> bool:
    """Wait; True if the generation was stopped meanwhile."""
    try:
        async with asyncio.timeout(delay_s):
            await stopped.wait()
    except TimeoutError:
        pass
    return stopped.is_set() and not script.deaf


def _completed(step: Step, index: int, finish_reason: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "chunk_index": index,
        "gate_reason": int(contract.GateReason.FIXED),
        "batch_rows": 1,
        "finish_reason": finish_reason,
    }
    if index == 0:
        values |= {"prompt_len": 3, "cached_len": 1, "queue_us": 40, "prefill_us": 900}
    return values | dict(step.values)


def _config_type(spec: TensorSpec) -> pb.DataType.ValueType:
    return pb.DataType.Value(f"TYPE_{spec.dtype.name}")


def _refusal(request: pb.ModelInferRequest) -> str:
    """What Triton says to a request that it does not enqueue; empty if it does."""
    model = request.model_name
    if model not in contract.MODELS:
        return f"Request for unknown model: '{model}' is not found"
    if not request.id:
        return "the request has no id"
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key in _PARAMETERS:
            if kind not in _PARAMETERS[key]:
                return f"parameter '{key}' has an unsupported type"
        elif key == "headers" or key.startswith("triton_"):
            return f"parameter '{key}' is reserved"
        elif kind == "uint64_param":
            return f"parameter '{key}' has an unsupported type"
    # Triton itself would be content; we could not tell the end.
    told = request.parameters["triton_enable_empty_final_response"].bool_param
    if model != contract.PREPROCESSING_MODEL and told is not True:
        return "parameter 'triton_enable_empty_final_response' has an unsupported type"
    inputs, outputs = contract.MODELS[model]
    return _tensor_refusal(request, {spec.name: spec for spec in inputs}) or next(
        (
            f"unexpected inference output '{output.name}' for model '{model}'"
            for output in request.outputs
            if output.name not in {spec.name for spec in outputs}
        ),
        "",
    )


def _tensor_refusal(request: pb.ModelInferRequest, specs: Mapping[str, TensorSpec]) -> str:
    model = request.model_name
    if len(request.inputs) != len(request.raw_input_contents):
        return f"expected tensors for {len(request.inputs)} inputs"
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        spec = specs.get(tensor.name)
        if spec is None:
            return f"unexpected inference input '{tensor.name}' for model '{model}'"
        if tensor.datatype != spec.dtype.value:
            return f"inference input '{tensor.name}' data-type is '{tensor.datatype}'"
        shape = list(tensor.shape)
        if len(shape) != len(spec.dims) or any(
            want not in (-1, got) for want, got in zip(spec.dims, shape, strict=True)
        ):
            return f"unexpected shape for input '{tensor.name}' for model '{model}'"
        if spec.dtype is not DataType.STRING:
            size = math.prod(shape) * struct.calcsize("<" + _CODES[spec.dtype])
            if len(content) != size:
                return f"unexpected total byte size {len(content)} for input '{tensor.name}'"
        elif len(content) < 4 or len(content) != 4 + struct.unpack_from("<I", content)[0]:
            return f"unexpected total byte size {len(content)} for input '{tensor.name}'"
    given = {tensor.name for tensor in request.inputs}
    if len(given) != len(request.inputs):
        return f"expected {len(given)} inputs but got {len(request.inputs)} inputs"
    missing = [name for name, spec in specs.items() if not spec.optional and name not in given]
    if missing:
        return f"expected {len(specs)} inputs but got {len(given)}: {missing[0]} is missing"
    return ""


def _received(request: pb.ModelInferRequest, context: Any) -> Received:
    parameters = {
        key: getattr(value, str(value.WhichOneof("parameter_choice")))
        for key, value in request.parameters.items()
    }
    metadata = dict(context.invocation_metadata())
    return Received(request.id, _decode(request), metadata, parameters, context.peer())


def _decode(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Tensors by name: text, or a list of numbers. Raises DraftgateError as the models do."""
    specs = {spec.name: spec for spec in contract.MODELS[request.model_name][0]}
    found: dict[str, Any] = {}
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        dtype = specs[tensor.name].dtype
        if dtype is DataType.STRING:
            try:
                found[tensor.name] = content[4:].decode()
            except UnicodeDecodeError as error:
                raise invalid_argument(tensor.name, "bytes", "UTF-8") from error
        else:
            count = math.prod(tensor.shape)
            found[tensor.name] = list(struct.unpack(f"<{count}{_CODES[dtype]}", content))
    return found


async def _send(
    context: Any,
    request: pb.ModelInferRequest,
    specs: Sequence[TensorSpec],
    values: Mapping[str, Any],
    *,
    final: bool,
) -> None:
    """A response with every output: the value given, else an empty tensor, as the models do."""
    unknown = values.keys() - {spec.name for spec in specs}
    assert not unknown, f"no such outputs: {unknown}"
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.model_version, response.id = request.model_name, "1", request.id
    response.parameters["triton_final_response"].bool_param = final
    for spec in specs:
        content, count = _encode(spec, values.get(spec.name))
        response.outputs.add(name=spec.name, datatype=spec.dtype.value, shape=[count])
        response.raw_output_contents.append(content)
    await context.write(message)


def _encode(spec: TensorSpec, value: Any) -> tuple[bytes, int]:
    if value is None:
        return b"", 0
    if spec.dtype is DataType.STRING:
        text = value.encode()
        return struct.pack("<I", len(text)) + text, 1
    elements = value if isinstance(value, list) else [value]
    return struct.pack(f"<{len(elements)}{_CODES[spec.dtype]}", *elements), len(elements)


def _failure(wire_id: str, error: DraftgateError) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse(error_message=to_wire(error))
    message.infer_response.id = wire_id
    return message


def _final(model: str, wire_id: str) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.model_version, response.id = model, "1", wire_id
    response.parameters["triton_final_response"].bool_param = True
    return message
