"""Settings from variables of the environment, and variables that are meant for one and are none."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

from pydantic_settings import EnvSettingsSource, SettingsError

from draftgate.config.settings import Settings
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["PREFIX", "read_environment", "strangers"]

PREFIX = "DRAFTGATE_"

_OTHERS = frozenset(
    PREFIX + name
    for name in (
        # How the commands reach a server.
        *("SERVER", "API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE"),
        # What `serve` tells the models that it runs in Triton.
        *("ENGINE", "MODEL_DIR", "PYTHONPATH"),
    )
)
"""What begins like a setting and is for another part of Draftgate."""

# Kubernetes tells every container where the services of its namespace are, by variables that begin
# with the service's name, which may well be draftgate or draftgate-something.
_OF_KUBERNETES = re.compile(
    r"DRAFTGATE_(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT_OF_KUBERNETES = re.compile(r"DRAFTGATE_(.+_)?PORT")
_ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://.+:\d+")


def read_environment() -> dict[str, object]:
    """The settings that the environment has. Raises DraftgateError for one that cannot be read."""
    try:
        found = EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT, f"environment: {str(error).split(' from source')[0]}"
        ) from None
    for variable, _ in strangers():
        _forget(found, variable.upper().removeprefix(PREFIX).lower().split("__"))
    return found


def strangers(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Variables that name no setting though they begin as if they did, each with what to say."""
    known = {*_names(), *_OTHERS}
    for variable in sorted(environment):
        name = variable.upper()  # As the settings' own: in any case.
        if not name.startswith(PREFIX) or name in known:
            continue
        if _is_of_kubernetes(name, environment[variable]):
            continue
        nearest = _nearest(name, known)
        instead = f"; the nearest is {nearest}" if nearest else ""
        yield variable, f"{variable}: it names no setting{instead} (environment)"


def _nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant; empty if nothing is like it."""
    # The prefix is all of theirs and would make everything look alike.
    words = sorted(each.removeprefix(PREFIX) for each in known)
    found = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1)
    return PREFIX + found[0] if found else ""


def _forget(section: dict[str, Any], path: list[str]) -> None:
    """Take out what stands there, and sections of which nothing is left."""
    name, *rest = path
    inner = section.get(name)
    if not rest:
        section.pop(name, None)
    elif isinstance(inner, dict):
        _forget(inner, rest)
        if not inner:
            del section[name]


def _is_of_kubernetes(name: str, value: str) -> bool:
    if _OF_KUBERNETES.fullmatch(name):
        return True
    return bool(_PORT_OF_KUBERNETES.fullmatch(name) and _ADDRESS_OF_KUBERNETES.fullmatch(value))


def _names() -> Iterator[str]:
    """The variable of each setting, and of each section, which may be given as JSON."""
    for name, field in Settings.model_fields.items():
        yield from _names_in(field.annotation, PREFIX + name.upper())


def _names_in(kind: Any, prefix: str) -> Iterator[str]:
    yield prefix
    for section in filter(dataclasses.is_dataclass, (kind, *get_args(kind))):
        for name, hint in get_type_hints(section).items():
            yield from _names_in(hint, f"{prefix}__{name.upper()}")
