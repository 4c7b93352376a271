"""Reading a checkpoint folder tensor by tensor, FP8 weights dequantised on the way.

Only one tensor is held at a time: the files are mapped, and a caller that packs each tensor before
asking for the next never holds a second copy of the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """The tensors of a Hugging Face folder of safetensors, plain or in ModelOpt's FP8 layout."""

    def __init__(self, model_dir: Path, *, prepared: bool = True) -> None:
        """prepared: whether `draftgate model prepare` makes such folders, as it does a target's.

        Raises DraftgateError(FAILED_PRECONDITION) when there is nothing readable there.
        """
        self._dir = model_dir
        self._where: dict[str, Path] = {}
        paths = sorted(model_dir.glob("*.safetensors"))
        if not paths:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"{model_dir} holds no .safetensors file"
                + (": prepare a checkpoint with `draftgate model prepare`" if prepared else ""),
            )
        for path in paths:
            try:
                with safe_open(path, framework="pt") as opened:
                    self._where.update(dict.fromkeys(opened.keys(), path))
            except SafetensorError as error:
                raise DraftgateError(
                    ErrorCode.FAILED_PRECONDITION,
                    f"{path} is damaged ({error})"
                    + (": delete the folder and prepare it again" if prepared else ""),
                ) from error

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._where

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the file, mapped rather than read.

        Raises DraftgateError(FAILED_PRECONDITION) when there is none of this name.
        """
        path = self._where.get(name)
        if path is None:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION, f"{self._dir} lacks the tensor {name}"
            )
        with safe_open(path, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in fp32, an FP8 one times its `weight_scale`.

        Raises DraftgateError(FAILED_PRECONDITION) when it is missing or of another shape.
        """
        stored = self.stored(name)
        if tuple(stored.shape) != shape:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"{self._dir}: {name} has shape {list(stored.shape)}, "
                f"config.json says {list(shape)}",
            )
        weight = stored.to(torch.float32)
        if stored.dtype == torch.float8_e4m3fn:
            weight *= self.stored(name + "_scale").to(torch.float32)
        return weight
