"""Puts the sources of the settings together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftgate import yamlfile
from draftgate.config.environment import read_environment, strangers
from draftgate.config.settings import Settings
from draftgate.errors import DraftgateError, ErrorCode, joined

__all__ = ["Examined", "Loaded", "changed", "examine", "load"]

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


@dataclass(frozen=True)
class Examined:
    """Settings with all that is wrong with them."""

    settings: Settings | None
    """Of what is right: what is wrong is left out. None if that makes none, or if a source could
    not be read, which may have had what then seems to be missing."""
    sources: Mapping[str, str]
    """As `Loaded.sources`."""
    problems: Sequence[DraftgateError]
    left_out: frozenset[str]
    """The keys of the outermost sections of which something is."""


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Loaded:
    """The settings that a file, the environment and flags give; later ones win, key by key.

    Raises DraftgateError naming every key that is wrong, and where it stands, and every variable
    that begins like a setting's and is none.
    """
    found = examine(file, flags)
    if found.problems:
        raise joined(found.problems)
    assert found.settings is not None
    return Loaded(found.settings, found.sources)


def examine(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Examined:
    """The same settings, and what is wrong with them, as far as they tell by themselves."""
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    problems: list[DraftgateError] = []
    given_by: list[tuple[str, Callable[[], Mapping[str, object]]]] = [
        (str(file), lambda: yamlfile.read_mapping(file) if file else {}),
        ("environment", read_environment),
        ("command line", lambda: flags or {}),
    ]
    for source, read in given_by:
        try:
            given = read()
        except DraftgateError as error:
            problems.append(error)
            continue
        _merge(values, given)
        sources.update(dict.fromkeys(_keys(given), source))
    all_read = not problems
    problems += [_wrong(problem) for _, problem in strangers()]
    settings, faults = _validated(values)
    for each in faults:
        place = f" ({sources[each.key]})" if each.key in sources else ""
        problems.append(_wrong(each.message + place))
    return Examined(settings if all_read else None, sources, problems, _sections(faults))


def _validated(values: dict[str, object]) -> tuple[Settings | None, list[yamlfile.Fault]]:
    """Settings of what is right in `values`, and all that is not: each time something is found, it
    is taken out, since it may have hidden something else."""
    faults: list[yamlfile.Fault] = []
    known: set[tuple[str, ...]] = set()
    while True:
        try:
            return Settings.model_validate(values), faults
        except ValidationError as error:
            found = yamlfile.faults(error)
        # What is only missing since it was taken out is not wrong.
        faults += [each for each in found if each.place not in known]
        known.update(each.place for each in found)
        standing = {_standing(values, each.place) for each in found}
        if () in standing:
            return None, faults
        for place in standing:
            _take_out(values, place)


def _standing(values: object, place: tuple[str, ...]) -> tuple[str, ...]:
    """As much of the way to a place as there is: the place, or the section in which it is
    missing."""
    if not place or not isinstance(values, dict) or place[0] not in values:
        return ()
    return (place[0], *_standing(values[place[0]], place[1:]))


def _take_out(values: dict[str, Any], place: tuple[str, ...]) -> None:
    """Remove what stands there, unless the section has been removed meanwhile."""
    *sections, last = place
    for name in sections:
        values = values.get(name, {})
    values.pop(last, None)


def _sections(faults: Sequence[yamlfile.Fault]) -> frozenset[str]:
    return frozenset(each.place[0] for each in faults if each.place)


def _wrong(message: str) -> DraftgateError:
    return DraftgateError(ErrorCode.INVALID_ARGUMENT, message)


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
