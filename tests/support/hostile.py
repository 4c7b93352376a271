"""Requests of somebody who means ill, made of any message's own description."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["Hostile"]

_INT32, _INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
_INTEGER_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: _INT64,
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: _INT32,
}
_INTEGERS = (0, 1, -1, 2, 5, 50, 1000, 10**6)
_NUMBERS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-45, 3.4e38, -3.4e38),
    *(float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *("", " ", "a", "Hi", "\0", "\x1b[31m", "\r\n\r\n", "\ufeff", "\u202e", "\U0010ffff", "é" * 90),
    *("../../etc/passwd", "%s%n%x", "{{ 7 * 7 }}", '{"op": "counters"}', "[draftgate:INTERNAL:] x"),
    *("' OR 1=1 --", "null", "NaN", "-1", "x" * 300, "\n" * 2000),
)
_LONG_TEXT = 70_000
_DEEPEST = 4


class Hostile:
    """Draws everything from one seed. `words` are texts that the server takes seriously."""

    def __init__(self, seed: int, words: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self._texts = (*_TEXTS, *words, *words)

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        """Any message of a kind; each of its fields is there or not."""
        made = kind()
        for field in made.DESCRIPTOR.fields:
            if self.random.random() < 0.4:
                self._set(made, field, depth)
        return made

    def spoiled(self, good: Message) -> Message:
        """A message that would do, with a field or two that may not."""
        made = type(good)()
        made.CopyFrom(good)
        for _ in range(self.random.choice((1, 1, 2))):
            self._spoil(made)
        return made

    def content(self, good: bytes) -> bytes:
        """Bytes that are no such message, or only just."""
        draw = self.random
        kind = draw.randrange(8)
        if kind == 0:
            return draw.randbytes(draw.randrange(200))
        if kind == 1:
            return good[: draw.randrange(len(good) + 1)]
        if kind == 2:
            return self._flipped(good)
        if kind == 3:
            # More than there is: a length that promises gigabytes, a number without an end.
            return good + draw.choice((b"\x0a\xff\xff\xff\xff\x7f", b"\x08" + b"\xff" * 11))
        if kind == 4:
            return good + b"\x0b" * draw.choice((1, 99, 101, 20_000))  # groups in groups
        if kind == 5:
            return self._nested(draw.randrange(1, 16), draw.choice((5, 99, 101, 2000)))
        if kind == 6:
            # A field of each number with text that is none.
            return good + bytes((draw.randrange(1, 16) << 3 | 2, 2)) + b"\xff\xfe"
        return good + good + draw.randbytes(draw.randrange(8))

    def metadata(self) -> list[tuple[str, str | bytes]]:
        """Headers; most calls have none."""
        draw = self.random
        if draw.random() < 0.7:
            return []
        choices: tuple[tuple[str, str | bytes], ...] = (
            ("traceparent", draw.choice(("", "00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"))),
            ("traceparent", f"00-{draw.randbytes(16).hex()}-{draw.randbytes(8).hex()}-01"),
            ("tracestate", "a=b," * draw.choice((1, 64, 600))),
            ("baggage", "x" * draw.choice((1, 3000))),
            ("authorization", draw.choice(("", "Bearer", "Bearer ", "Bearer a.b.c", "Basic eDp5"))),
            ("x-request-id", "x" * draw.choice((1, 5000, 20_000))),
            ("x-anything-bin", draw.randbytes(draw.randrange(100))),
            ("triton_grpc_error", "true"),
        )
        return draw.choices(choices, k=draw.randrange(1, 5))

    def _spoil(self, message: Message) -> None:
        field = self.random.choice(message.DESCRIPTOR.fields or (None,))
        if field is None:
            return
        inner = field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field)
        # What is there already is spoiled further down, where it is not reached by chance alone.
        if inner and field.is_repeated and getattr(message, field.name):
            self._spoil(self.random.choice(getattr(message, field.name)))
        elif inner and not field.is_repeated and message.HasField(field.name):
            self._spoil(getattr(message, field.name))
        else:
            message.ClearField(field.name)
            self._set(message, field, 0)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        target = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth >= _DEEPEST:
            return
        if _is_map(field):
            self._fill_map(target, field, depth)
        elif field.is_repeated:
            for _ in range(self.random.choice((0, 1, 1, 2, 3, 40))):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    target.add().CopyFrom(self.message(_class_of(field), depth + 1))
                else:
                    target.append(self._value(field))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            target.CopyFrom(self.message(_class_of(field), depth + 1))
            target.SetInParent()
        else:
            setattr(message, field.name, self._value(field))

    def _fill_map(self, target: Any, field: FieldDescriptor, depth: int) -> None:
        entry = field.message_type.fields_by_name
        for _ in range(self.random.choice((0, 1, 3))):
            key = self._value(entry["key"])
            if entry["value"].type == FieldDescriptor.TYPE_MESSAGE:
                target[key].CopyFrom(self.message(_class_of(entry["value"]), depth + 1))
            else:
                target[key] = self._value(entry["value"])

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self.random
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 4, 8, 64, 5000)))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return "y" * _LONG_TEXT if draw.random() < 0.02 else draw.choice(self._texts)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return draw.choice(_NUMBERS)
        low, high = _INTEGER_LIMITS[field.cpp_type]
        found = draw.choice((*_INTEGERS, low, high, high - 1, draw.randint(low, high)))
        return min(max(found, low), high)

    def _flipped(self, good: bytes) -> bytes:
        found = bytearray(good or b"\0")
        for _ in range(self.random.randrange(1, 6)):
            found[self.random.randrange(len(found))] ^= 1 << self.random.randrange(8)
        return bytes(found)

    def _nested(self, number: int, depth: int) -> bytes:
        found = b""
        for _ in range(depth):
            found = bytes((number << 3 | 2,)) + _varint(len(found)) + found
        return found


def _class_of(field: FieldDescriptor) -> type[Message]:
    found: type[Message] = message_factory.GetMessageClass(field.message_type)
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
