"""What an operator asks of the gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from draftgate.errors import invalid_argument

__all__ = ["Mode", "Policy"]


class Mode(StrEnum):
    """Who decides the draft length."""

    AUTO = "auto"
    """The gate, by load."""
    OFF = "off"
    """Nobody drafts."""
    FIXED = "fixed"
    """`Policy.draft_len`, whatever the load."""


@dataclass(frozen=True)
class Policy:
    """Limits and wishes; the gate does its best within them."""

    mode: Mode = Mode.AUTO
    draft_len: int = 0
    """K of the mode `fixed`."""
    max_draft_len: int | None = None
    """Most drafted tokens of a row in a step; None: what the engine allows."""
    max_step_ms: float | None = None
    """Ceiling on a step, so on the gap between two chunks of a stream (ITL), that all but one step
    in 200 are to keep; None: none."""
    max_tpot_ms: float | None = None
    """Wish for the mean time per output token of a row; None: none."""

    def validate(self, highest: int) -> None:
        """Raise DraftgateError(INVALID_ARGUMENT) for the first field out of range.

        highest: the engine's longest draft.
        """
        for name in ("draft_len", "max_draft_len"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= highest):
                raise invalid_argument(name, value, f"an integer 0 to {highest}")
        for name in ("max_step_ms", "max_tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise invalid_argument(name, value, "a time above 0, in ms")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> Policy:
        """From JSON. Raises DraftgateError(INVALID_ARGUMENT) naming what is wrong."""
        known = [f.name for f in fields(cls)]
        for name in raw:
            if name not in known:
                raise invalid_argument(name, raw[name], f"one of {', '.join(known)}")
        found = dict(raw)
        if "mode" in found:
            modes = [mode.value for mode in Mode]
            if found["mode"] not in modes:
                raise invalid_argument("mode", found["mode"], " or ".join(modes))
            found["mode"] = Mode(str(found["mode"]))
        for name in ("draft_len", "max_draft_len"):
            if name in found and type(found[name]) is not int and found[name] is not None:
                raise invalid_argument(name, found[name], "an integer")
        for name in ("max_step_ms", "max_tpot_ms"):
            value = found.get(name)
            if value is not None:
                found[name] = _milliseconds(name, value)
        if found.get("draft_len", 0) is None:
            raise invalid_argument("draft_len", None, "an integer")
        return cls(**found)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, object]:
        """What `from_mapping` reads."""
        return asdict(self)


def _milliseconds(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass  # an integer beyond all floats
    raise invalid_argument(name, value, "a number of milliseconds")
