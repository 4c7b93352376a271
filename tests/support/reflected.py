"""What a server says that it offers, as reflection tells it: methods and their messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

__all__ = ["SERVICES", "Method", "reflected_methods"]

SERVICES = [
    "draftgate.v1.AdminService",
    "draftgate.v1.GateService",
    "draftgate.v1.GenerationService",
    "draftgate.v1.ModelService",
    "draftgate.v1.SessionService",
    "draftgate.v1.TokenizerService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]
"""All that a gateway offers, in order."""


@dataclass(frozen=True)
class Method:
    """One method of one service."""

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    streams_in: bool
    streams_out: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


async def reflected_methods(channel: grpc.aio.Channel) -> list[Method]:
    """Every method of every service that the server lists. Fails where a message is missing."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    answer = await _ask(call, list_services="")
    services = [each.name for each in answer.list_services_response.service]
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for service in services:
        answer = await _ask(call, file_containing_symbol=service)
        for content in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(content)
            files[file.name] = file
    await call.done_writing()
    pool = descriptor_pool.DescriptorPool()
    for name in files:
        _add(name, files, pool)
    return [
        Method(
            service,
            method.name,
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.client_streaming,
            method.server_streaming,
        )
        for service in services
        for method in pool.FindServiceByName(service).methods
    ]


async def _ask(call: Any, **request: Any) -> Any:
    await call.write(reflection_pb2.ServerReflectionRequest(**request))
    return await call.read()


def _add(
    name: str,
    files: dict[str, descriptor_pb2.FileDescriptorProto],
    pool: descriptor_pool.DescriptorPool,
) -> None:
    """Add a file behind those that it needs."""
    try:
        pool.FindFileByName(name)
    except KeyError:
        for needed in files[name].dependency:
            _add(needed, files, pool)
        pool.AddSerializedFile(files[name].SerializeToString())
