"""What a request gets for what it leaves out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.jsonfile import read_object
from draftgate.sampling import SamplingParams

__all__ = ["RequestDefaults"]

_log = logging.getLogger(__name__)

_MAX_TOKENS = 256
_ANY_ID = 2**31 - 1

_GENERATION_CONFIG = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""The names of Hugging Face, and ours."""


@dataclass(frozen=True)
class RequestDefaults:
    """None leaves a parameter to the model's `generation_config.json`, if that counts and has it,
    and else to SamplingParams. Unchanged Triton clients, who are passed through, get none of it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    """None: 256, or what `generation_config` says."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    generation_config: bool = False
    """Take what is not given here from the `generation_config.json` of the folder with the model's
    tokenizer, if it has one."""

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) for what no request could ask for."""
        self.sampling.validate(vocab_size=_ANY_ID, prefix="defaults.")

    @property
    def sampling(self) -> SamplingParams:
        """What a request that asks for nothing gets."""
        names = {each.name for each in fields(self)} - {"generation_config"}
        given = {name: getattr(self, name) for name in names}
        known = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"max_tokens": _MAX_TOKENS, **known})

    def completed(self, folder: Path | None) -> RequestDefaults:
        """With what the model's own file says, if that counts. Blocks to read it.

        Raises DraftgateError: INVALID_ARGUMENT if that is asked for without a folder, or for what
        no request could ask for; FAILED_PRECONDITION for a file that cannot be read.
        """
        if not self.generation_config:
            return self
        if folder is None:
            allowed = "false without the folder of the model's tokenizer"
            raise invalid_argument("defaults.generation_config", True, allowed)
        path = folder / "generation_config.json"
        if not path.is_file():
            _log.info("%s has no generation_config.json", folder)
            return self
        found = _read(path)
        return replace(self, **{name: value for name, value in found.items() if self._lacks(name)})

    def _lacks(self, name: str) -> bool:
        return getattr(self, name) is None


def _read(path: Path) -> dict[str, Any]:
    """The parameters in the file, by our names."""
    raw = read_object(path)
    found = {ours: raw.get(theirs) for theirs, ours in _GENERATION_CONFIG.items()}
    # Only where it is said: by Hugging Face's own default nothing is ever drawn by chance.
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        wanted = int if name in ("max_tokens", "top_k") else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{path}: {name} is no such number")
    SamplingParams(**{"max_tokens": _MAX_TOKENS, **given}).validate(
        vocab_size=_ANY_ID, prefix=f"{path}: "
    )
    return given
