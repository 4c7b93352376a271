"""A small client of Triton's protocol for tests, on our own stubs.

Stock `tritonclient` registers the same protobuf names as ours and so cannot live in one process
with the gateway; the example of its use is run as a program of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import grpc
import numpy as np

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub

__all__ = ["InferError", "infer", "stream_infer"]

_DATATYPES = {
    "object": "BYTES",
    "bool": "BOOL",
    "int32": "INT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float32": "FP32",
}
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()}


class InferError(Exception):
    """What Triton said was wrong, in-band or as the status."""


def infer(
    target: str, model: str, inputs: Mapping[str, np.ndarray], *, timeout_s: float = 20.0
) -> dict[str, np.ndarray]:
    """One answer of a model that is not decoupled. Raises InferError."""
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            return _outputs(stub.ModelInfer(_request(model, inputs, ""), timeout=timeout_s))
        except grpc.RpcError as error:
            raise InferError(error.details()) from error


def stream_infer(
    target: str,
    model: str,
    inputs: Mapping[str, np.ndarray],
    *,
    request_id: str = "1",
    timeout_s: float = 120.0,
) -> Iterator[dict[str, np.ndarray]]:
    """Every answer to one request, to the end of its stream; leaving early cancels it.

    Raises InferError.
    """
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([_request(model, inputs, request_id)]), timeout=timeout_s)
        try:
            for response in call:
                if response.error_message:
                    raise InferError(response.error_message)
                if response.infer_response.outputs:
                    yield _outputs(response.infer_response)
        except grpc.RpcError as error:
            raise InferError(error.details()) from error
        finally:
            call.cancel()


def _request(model: str, inputs: Mapping[str, np.ndarray], request_id: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, array in inputs.items():
        datatype = _DATATYPES[str(array.dtype)]
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(
            _packed(array) if datatype == "BYTES" else array.tobytes()
        )
    return request


def _packed(array: np.ndarray) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel())


def _outputs(response: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _array(output, content) for output, content in contents}


def _array(output: pb.ModelInferResponse.InferOutputTensor, content: bytes) -> np.ndarray:
    if output.datatype != "BYTES":
        dtype = np.dtype(_DTYPES[output.datatype])
        return np.frombuffer(content, dtype).reshape(tuple(output.shape))
    items, offset = [], 0
    while offset < len(content):
        (length,) = struct.unpack_from("<I", content, offset)
        items.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return np.array(items, dtype=object).reshape(tuple(output.shape))
