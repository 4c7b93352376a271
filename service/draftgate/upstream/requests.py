"""Domain requests -> inference requests with the contract's tensors."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Mapping, Sequence

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.contract import DataType, TensorSpec
from draftgate.sampling import SamplingParams
from draftgate.upstream.types import ChatPrompt, GenerationRequest, Prompt, TextPrompt

__all__ = ["control_request", "engine_request", "generation_request", "stop_request"]

Value = bool | int | float | str | Sequence[int]

_STRUCT_CODES = {
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.UINT64: "Q",
    DataType.FP32: "f",
    DataType.BOOL: "?",
}


def generation_request(request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
    """The request to the ensemble. What equals the contract's default is left out."""
    values = _generation_values(request)
    return _infer_request(contract.ENSEMBLE_MODEL, contract.ENSEMBLE_INPUTS, wire_id, values)


def engine_request(request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
    """The same straight to the engine; its prompt has to be ids."""
    values = _generation_values(request)
    made = _infer_request(contract.ENGINE_MODEL, contract.ENGINE_INPUTS, wire_id, values)
    for spec in contract.ENGINE_OUTPUTS:
        if spec.name not in (contract.CONTEXT_IDS, contract.CONTROL_RESULT):
            made.outputs.add(name=spec.name)
    return made


def stop_request(wire_id: str) -> pb.ModelInferRequest:
    """The request to the engine that ends the generation of the same id."""
    return _infer_request(
        contract.ENGINE_MODEL, contract.ENGINE_INPUTS, wire_id, {contract.STOP: True}
    )


def control_request(wire_id: str, op: str, arguments: Mapping[str, object]) -> pb.ModelInferRequest:
    """The request to the engine's control plane."""
    return _infer_request(
        contract.ENGINE_MODEL,
        contract.ENGINE_INPUTS,
        wire_id,
        {contract.CONTROL: json.dumps({"op": op, **arguments})},
    )


def _generation_values(request: GenerationRequest) -> Mapping[str, Value]:
    values = dict(_prompt_tensors(request.prompt))
    for field in dataclasses.fields(SamplingParams):  # Every name is a tensor.
        value = getattr(request.sampling, field.name)
        if value != field.default:
            values[field.name] = value
    if request.resume_len:
        values["resume_len"] = request.resume_len
    if request.deadline_ms is not None:
        values["deadline_ms"] = request.deadline_ms
    return values


def _prompt_tensors(prompt: Prompt) -> Mapping[str, Value]:
    if isinstance(prompt, TextPrompt):
        return {"text_input": prompt.text}
    if isinstance(prompt, ChatPrompt):
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        return {"messages": json.dumps(messages, ensure_ascii=False)}
    return {"input_ids": prompt.ids}


def _infer_request(
    model: str, specs: Iterable[TensorSpec], wire_id: str, values: Mapping[str, Value]
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=wire_id)
    # Without it a generation that ends on a flag alone would end without a last response.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for spec in specs:
        if spec.name in values:
            content, count = _encode(spec, values[spec.name])
            request.inputs.add(name=spec.name, datatype=spec.dtype.value, shape=[count])
            request.raw_input_contents.append(content)
    return request


def _encode(spec: TensorSpec, value: Value) -> tuple[bytes, int]:
    """Little-endian content and number of elements of a one-dimensional tensor."""
    if isinstance(value, str):
        text = value.encode()
        return struct.pack("<I", len(text)) + text, 1
    elements = value if isinstance(value, Sequence) else (value,)
    return struct.pack(f"<{len(elements)}{_STRUCT_CODES[spec.dtype]}", *elements), len(elements)
