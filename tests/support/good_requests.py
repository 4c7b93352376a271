"""Requests that would do, of every kind; and Triton's own, made by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from draftgate import contract
from draftgate._pb.draftgate.v1 import admin_pb2, gate_pb2, session_pb2, tokenizer_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.inference import grpc_service_pb2 as triton_pb

__all__ = ["WORDS", "good_requests", "infer_request", "text_request"]

WORDS = (
    *("ensemble", "engine", "preprocessing", "user", "assistant", "system", "text_input"),
    *("BYTES", "INT32", "max_tokens", "stop", "control", "draftgate.v1.GenerationService"),
    *("inference.GRPCInferenceService", "draftgate/v1/generation.proto", "google.protobuf.Any"),
)
"""Texts that mean something to the server."""


def infer_request(
    model: str, request_id: str = "1", **tensors: tuple[str, bytes]
) -> triton_pb.ModelInferRequest:
    """With tensors of one element: their data types and contents."""
    request = triton_pb.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, (datatype, content) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(content)
    return request


def text_request(request_id: str = "1") -> triton_pb.ModelInferRequest:
    """A generation, for the prompt "Hi"."""
    return infer_request(
        contract.ENSEMBLE_MODEL,
        request_id,
        text_input=("BYTES", struct.pack("<I", 2) + b"Hi"),
        max_tokens=("INT32", struct.pack("<i", 9)),
    )


def good_requests() -> Mapping[str, Sequence[Message]]:
    """By the name of their message."""
    found: dict[str, list[Message]] = {}
    for each in (*_of_draftgate(), *_of_others()):
        found.setdefault(each.DESCRIPTOR.full_name, []).append(each)
    return found


def _of_draftgate() -> Sequence[Message]:
    sampling = pb.SamplingParameters(temperature=0.5, seed=1)
    generation = pb.GenerateRequest(prompt="Hi", max_tokens=5, sampling=sampling)
    chat = [pb.ChatMessage(role="user", content="Hi")]
    policy = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=2, max_step_ms=50.0)
    return (
        generation,
        pb.GenerateRequest(messages=chat, max_tokens=8, n=2, stop=["x"]),
        pb.GenerateRequest(input_ids=[1, 2, 3], resume_len=1, max_tokens=8, echo=True),
        pb.GenerateOnceRequest(generation=generation, return_tokens=True),
        session_pb2.SessionRequest(
            id="one", start=session_pb2.SessionStart(generation=generation, credits=1)
        ),
        session_pb2.SessionRequest(id="one", cancel=session_pb2.SessionCancel()),
        session_pb2.SessionRequest(id="one", credits=session_pb2.SessionCredits(tokens_events=3)),
        tokenizer_pb2.TokenizeRequest(prompt="Hi"),
        tokenizer_pb2.TokenizeRequest(messages=chat),
        tokenizer_pb2.DetokenizeRequest(ids=[1, 2]),
        gate_pb2.WatchStateRequest(interval_ms=50),
        gate_pb2.WatchStepsRequest(interval_ms=50, after_step=0),
        gate_pb2.SetPolicyRequest(policy=policy),
        admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_ERROR),
    )


def _of_others() -> Sequence[Message]:
    return (
        triton_pb.ModelConfigRequest(name=contract.ENGINE_MODEL),
        text_request(),
        infer_request(contract.ENGINE_MODEL, stop=("BOOL", b"\1")),
        infer_request(contract.ENGINE_MODEL, control=("BYTES", struct.pack("<I", 2) + b"{}")),
        health_pb2.HealthCheckRequest(service="draftgate.v1.GenerationService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="draftgate.v1.GateService"),
    )
