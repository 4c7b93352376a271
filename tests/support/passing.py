"""Requests in Triton's own protocol, and everything that a stream of them brings."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

__all__ = ["Streamed", "add", "engine_request", "final", "request", "rest", "stop", "stream"]


def request(
    text: str = "Hi",
    request_id: str = "1",
    model: str = "ensemble",
    max_tokens: int | None = 9,
    **parameters: Any,
) -> Any:
    made = pb.ModelInferRequest(model_name=model, id=request_id)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    content = text.encode()
    add(made, "text_input", "BYTES", struct.pack("<I", len(content)) + content)
    if max_tokens is not None:
        add(made, "max_tokens", "INT32", struct.pack("<i", max_tokens))
    return made


def engine_request(request_id: str, name: str, datatype: str, content: bytes) -> Any:
    made = pb.ModelInferRequest(model_name=contract.ENGINE_MODEL, id=request_id)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    add(made, name, datatype, content)
    return made


def stop(request_id: str) -> Any:
    """The request that ends the running one of this id."""
    return engine_request(request_id, contract.STOP, "BOOL", b"\1")


def add(made: pb.ModelInferRequest, name: str, datatype: str, content: bytes) -> None:
    made.inputs.add(name=name, datatype=datatype, shape=[1])
    made.raw_input_contents.append(content)


def final(response: pb.ModelStreamInferResponse) -> bool:
    """Whether it is the last one to its request."""
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


@dataclass
class Streamed:
    """Everything that one stream brought."""

    responses: list[pb.ModelStreamInferResponse] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    def text(self, request_id: str = "1") -> str:
        """The text of one of its requests."""
        return "".join(
            content[4:].decode()
            for response in self.responses
            if response.infer_response.id == request_id
            for output, content in zip(
                response.infer_response.outputs,
                response.infer_response.raw_output_contents,
                strict=True,
            )
            if output.name == "text_output"
        )

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong with which request."""
        failed = [each for each in self.responses if each.error_message]
        return {each.infer_response.id: each.error_message for each in failed}


async def stream(
    stub: GRPCInferenceServiceStub, *requests: Any, metadata: Sequence[tuple[str, str]] = ()
) -> Streamed:
    """What one stream with these requests brings, to its end."""
    call = stub.ModelStreamInfer(metadata=metadata)
    for each in requests:
        await call.write(each)
    await call.done_writing()
    return await rest(call)


async def rest(call: Any) -> Streamed:
    """What a stream still brings, to its end."""
    found = Streamed()
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            found.responses.append(response)
    except grpc.aio.AioRpcError as error:
        found.error = error
    return found
