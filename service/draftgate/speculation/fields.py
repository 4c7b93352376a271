"""Checking what a JSON file says, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftgate.errors import invalid_argument

__all__ = ["Fields"]


class Fields:
    """An object out of a file. Whatever is wrong with it is refused by name.

    Every method raises DraftgateError(INVALID_ARGUMENT) naming the field, its value, and what is
    allowed.
    """

    def __init__(self, name: str, raw: object) -> None:
        """name: of the file and the place in it."""
        if not isinstance(raw, Mapping):
            raise invalid_argument(name, raw, "an object")
        self._name = name
        self._raw: Mapping[str, Any] = raw

    def __contains__(self, key: str) -> bool:
        return key in self._raw

    def only(self, *keys: str) -> None:
        """Refuse any other field."""
        for key, value in self._raw.items():
            if key not in keys:
                raise invalid_argument(self.name(key), value, f"one of {', '.join(keys)}")

    def format(self, wanted: str) -> None:
        """Refuse another format than this."""
        if self._raw.get("format") != wanted:
            raise invalid_argument(self.name("format"), self._raw.get("format"), repr(wanted))

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer."""
        value = self._raw.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise invalid_argument(self.name(key), value, f"an integer {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Any number."""
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_argument(self.name(key), value, f"a number {low:g} to {high:g}")
        if not low <= value <= high:
            raise invalid_argument(self.name(key), value, f"{low:g} to {high:g}")
        return float(value)

    def items(self, key: str, *, empty: bool = False) -> Sequence[Any]:
        """A list. empty: it may have nothing in it."""
        value = self._raw.get(key)
        if not isinstance(value, list) or not (value or empty):
            raise invalid_argument(self.name(key), value, "a list" + ", not empty" * (not empty))
        return value

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(f"{self.name(key)}[{i}]", raw) for i, raw in enumerate(self.items(key))]

    def shares(self, key: str) -> list[float]:
        """A list of numbers from 0 to 1."""
        values = self.items(key)
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise invalid_argument(f"{self.name(key)}[{place}]", value, "0 to 1")
        return [float(value) for value in values]

    def name(self, key: str) -> str:
        """The field's full name."""
        return f"{self._name}: {key}" if ": " not in self._name else f"{self._name}.{key}"
