"""Reading YAML files that people write, into checked models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["OWN_FAULT", "Fault", "faults", "parse", "read_mapping"]

_Model = TypeVar("_Model", bound=BaseModel)

OWN_FAULT = "draftgate"
"""The type of a pydantic error whose context has a DraftgateError: its field and its message."""

_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Fault:
    """Something that is wrong in a mapping."""

    place: tuple[str, ...]
    """The keys that lead to it; none if it is about the mapping as a whole."""
    message: str
    """Names the place. Without the value, which may be a secret."""

    @property
    def key(self) -> str:
        """The place as one dotted key."""
        return ".".join(self.place)


class _TwiceError(yaml.MarkedYAMLError):
    """A key stands twice in a mapping; YAML forbids it, and PyYAML takes the second."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in seen:
                raise _TwiceError(problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[str, object]:
    """What a YAML file holds; nothing for an empty one.

    Raises DraftgateError: NOT_FOUND for a file that cannot be read, INVALID_ARGUMENT for one that
    is no YAML or no mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DraftgateError(
            ErrorCode.NOT_FOUND, f"{path} cannot be read: {error.strerror}"
        ) from error
    if len(content) > _MAX_BYTES:
        raise _bad(path, f"more than {_MAX_BYTES} bytes")
    try:
        found = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        # The error's own text shows the line, which may hold a secret.
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = "a key that stands twice" if isinstance(error, _TwiceError) else "no YAML"
        raise _bad(path, f"{what}{place}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise _bad(path, "no mapping of names")
    return found


def parse(model: type[_Model], values: dict[str, object], path: Path) -> _Model:
    """Raises DraftgateError(INVALID_ARGUMENT) naming every key of `path` that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _bad(path, "; ".join(each.message for each in faults(error))) from None


def faults(error: ValidationError) -> list[Fault]:
    """All that is wrong."""
    return [_fault(each) for each in error.errors(include_url=False, include_input=False)]


def _fault(said: ErrorDetails) -> Fault:
    if said["type"] == OWN_FAULT:
        return Fault(tuple(said["ctx"]["field"].split(".")), said["msg"])
    place = tuple(str(part) for part in said["loc"])
    return Fault(place, (f"{'.'.join(place)}: " if place else "") + said["msg"])


def _bad(path: Path, problem: str) -> DraftgateError:
    return DraftgateError(ErrorCode.INVALID_ARGUMENT, f"{path}: {problem}")
