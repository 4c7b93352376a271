"""Triton's statistics of several replicas as if they were one server's."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from draftgate._pb.inference import grpc_service_pb2 as pb

__all__ = ["summed"]

_KEYS = frozenset({"name", "version", "batch_size"})
"""They say which of several a message is."""
_LATEST = frozenset({"last_inference"})


def summed(answers: Iterable[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """Counts and durations are added, models matched by name and version; the last inference is
    the latest. What our protocol file does not know, the use of memory say, is left out."""
    total = pb.ModelStatisticsResponse()
    for answer in answers:
        _add(total, answer)
    return total


def _add(total: Message, more: Message) -> None:
    for field, value in more.ListFields():
        own = getattr(total, field.name)
        if field.message_type is None:
            merged = value if field.name in _KEYS else own + value
            setattr(total, field.name, max(own, value) if field.name in _LATEST else merged)
        elif field.message_type.GetOptions().map_entry:
            for key in value:
                _add(own[key], value[key])
        elif field.is_repeated:
            for each in value:
                same = next((found for found in own if _key(found) == _key(each)), None)
                _add(own.add() if same is None else same, each)
        else:
            _add(own, value)


def _key(message: Message) -> tuple[object, ...]:
    known = message.DESCRIPTOR.fields_by_name
    return tuple(getattr(message, name) for name in sorted(_KEYS) if name in known)
