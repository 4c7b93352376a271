"""A model to prepare, whatever file format it comes in: what the rest of the package sees of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from draftgate.checkpoint.architectures import ModelShape
from draftgate.checkpoint.files import bad_file
from draftgate.errors import DraftgateError, ErrorCode

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "check_shape", "import_prepare_tool", "open_source"]


class Source(Protocol):
    """A checked model: its configuration is supported and its tensors are all there."""

    @property
    def path(self) -> Path:
        """The GGUF file or the Hugging Face folder."""

    @property
    def shape(self) -> ModelShape:
        """Sizes and variants, from the configuration."""

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json`."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight in Hugging Face naming and layout, one at a time, fp32, bf16 or fp16."""

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""


def open_source(path: Path) -> Source:
    """Open a GGUF file or a Hugging Face folder and check that Draftgate can run it.

    Raises `DraftgateError`: NOT_FOUND when there is nothing, UNIMPLEMENTED for a model that is
    not supported, FAILED_PRECONDITION for files that are broken or incomplete.
    """
    from draftgate.checkpoint.gguf_source import GgufSource
    from draftgate.checkpoint.hf_source import HfSource

    if path.is_dir():
        return HfSource(path)
    if path.is_file():
        return GgufSource(path)
    raise DraftgateError(
        ErrorCode.NOT_FOUND, f"{path}: no such file or folder; give a GGUF file or a model folder"
    )


def check_shape(path: Path, name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    """Raise FAILED_PRECONDITION if a tensor does not have the shape the configuration implies."""
    if got != want:
        raise bad_file(
            path, f"tensor {name} has shape {list(got)}, the configuration implies {list(want)}"
        )


def import_prepare_tool(name: str) -> ModuleType:
    """Import a package of the `prepare` extra, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"preparing a checkpoint needs the Python package {package}; "
            "install it with: pip install 'draftgate[engine,prepare]'",
        ) from error
