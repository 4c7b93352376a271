"""Looking over a checkpoint folder before anything is started on it."""

from __future__ import annotations

from pathlib import Path

from draftgate.checkpoint.architectures import model_shape
from draftgate.checkpoint.files import bad_file
from draftgate.checkpoint.manifest import damage
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.jsonfile import read_object

__all__ = ["check_checkpoint"]


def check_checkpoint(folder: Path) -> None:
    """Raise DraftgateError with one line that says what to do unless `folder` can be served.

    NOT_FOUND if there is no checkpoint, FAILED_PRECONDITION if it is incomplete or damaged,
    UNIMPLEMENTED for an architecture that is not supported. Loads no torch.
    """
    again = f"prepare it again with `draftgate model prepare --from SOURCE --out {folder}`"
    if not (folder / "config.json").is_file():
        raise DraftgateError(
            ErrorCode.NOT_FOUND,
            f"{folder} holds no checkpoint (config.json is missing): prepare one with "
            f"`draftgate model prepare --from SOURCE --out {folder}`",
        )
    model_shape(read_object(folder / "config.json"))
    if not (folder / "tokenizer.json").is_file():
        raise bad_file(folder, f"has no tokenizer.json; {again}")
    if not list(folder.glob("*.safetensors")):
        raise bad_file(folder, f"holds no .safetensors file; {again}")
    found = damage(folder)
    if found:
        raise bad_file(folder, f"{found}; {again}")
