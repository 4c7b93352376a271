"""Puts the sources of the settings together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from draftgate import yamlfile
from draftgate.config.environment import read_environment, strangers
from draftgate.config.settings import Settings
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["Loaded", "changed", "load"]

_USER_INFO = re.compile(r"//[^/@]*@")


@dataclass(frozen=True)
class Loaded:
    """The settings in force."""

    settings: Settings
    sources: Mapping[str, str]
    """Where each value that is no default came from, by its dotted key."""

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Each dotted key with its value, fit to be shown, and where that came from."""
        for key, value in _leaves(self.settings):
            shown = "" if value is None else _USER_INFO.sub("//***@", str(value))
            yield key, shown, self.sources.get(key, "default")


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Loaded:
    """The settings that a file, the environment and flags give; later ones win, key by key.

    Raises DraftgateError naming every key that is wrong, and where it stands, and every variable
    that begins like a setting's and is none.
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for source, given in (
        (str(file), yamlfile.read_mapping(file) if file else {}),
        ("environment", read_environment()),
        ("command line", dict(flags or {})),
    ):
        _merge(values, given)
        sources.update(dict.fromkeys(_keys(given), source))
    problems = [problem for _, problem in strangers()]
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        problems.append(yamlfile.problems(error, sources))
    if problems:
        raise DraftgateError(ErrorCode.INVALID_ARGUMENT, "; ".join(problems))
    return Loaded(settings, sources)


def changed(old: Settings, new: Settings) -> list[str]:
    """The dotted keys of which the values differ."""
    before = dict(_leaves(old))
    after = dict(_leaves(new))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _merge(into: dict[str, object], given: Mapping[str, object]) -> None:
    for key, value in given.items():
        present = into.get(key)
        if isinstance(value, Mapping):
            section = dict(present) if isinstance(present, Mapping) else {}
            _merge(section, value)
            into[key] = section
        else:
            into[key] = value


def _keys(given: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in given.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def _leaves(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value with its dotted key; a section that is not there is a value, None."""
    names = (
        type(section).model_fields
        if isinstance(section, Settings)
        else [each.name for each in dataclasses.fields(section)]  # type: ignore[arg-type]
    )
    for name in names:
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
