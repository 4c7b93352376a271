"""ModelOpt's FP8 layout: what must be in a prepared folder, and reading it back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftgate.checkpoint.architectures import (
    ModelShape,
    is_quantised,
    model_shape,
    tensor_shapes,
)
from draftgate.checkpoint.files import bad_file, read_json
from draftgate.checkpoint.hf_source import safetensors_files

__all__ = ["StoredTensor", "check_layout", "checkpoint_bytes", "stored_tensors"]

_FP8, _SCALE, _OTHER = "F8_E4M3", "F32", "BF16"
_ITEM_BYTES = {_FP8: 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_SMALL_FILES_BYTES = 32 << 20
"""Room for tokenizer, configs and file headers."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    dtype: str
    """As safetensors names it: F8_E4M3, BF16, F32, ..."""
    shape: tuple[int, ...]
    value: float | None
    """The number of a scalar; None for anything larger."""

    @property
    def bytes(self) -> int:
        """Size of its values."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def stored_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Headers of all tensors in a folder's safetensors files, with the values of scalars.

    Raises `DraftgateError` (FAILED_PRECONDITION) if a file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    for file in safetensors_files(folder):
        try:
            # torch knows every dtype in the files; numpy lacks bf16 and FP8.
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    header = opened.get_slice(name)
                    shape = tuple(header.get_shape())
                    scalar = math.prod(shape) == 1
                    value = float(opened.get_tensor(name)) if scalar else None
                    yield name, StoredTensor(header.get_dtype(), shape, value)
        except (SafetensorError, OSError) as error:
            raise bad_file(file, f"cannot be read as safetensors: {error}") from error


def check_layout(folder: Path) -> ModelShape:
    """Raise `DraftgateError` (FAILED_PRECONDITION) unless `folder` is a whole FP8 checkpoint."""
    quantization = read_json(folder / "hf_quant_config.json").get("quantization", {})
    if quantization.get("quant_algo") != "FP8":
        raise bad_file(folder, f"quant_algo is {quantization.get('quant_algo')!r}, not FP8")
    if "lm_head" not in quantization.get("exclude_modules", []):
        raise bad_file(folder, "lm_head is not among the modules excluded from FP8")
    shape = model_shape(read_json(folder / "config.json"))
    found = dict(stored_tensors(folder))
    for name, want in tensor_shapes(shape).items():
        dtype = _FP8 if is_quantised(name) else _OTHER
        _check_tensor(folder, found, name, dtype, want)
        if is_quantised(name):
            module = name.removesuffix("weight")
            for scale in ("weight_scale", "input_scale"):
                _check_tensor(folder, found, module + scale, _SCALE, ())
    if found:
        raise bad_file(folder, f"has an unexpected tensor {next(iter(found))}")
    return shape


def checkpoint_bytes(shape: ModelShape) -> int:
    """About how large the prepared folder of such a model is; never less than it is."""
    weights = sum(
        math.prod(size) * _ITEM_BYTES[_FP8 if is_quantised(name) else _OTHER]
        for name, size in tensor_shapes(shape).items()
    )
    return weights + _SMALL_FILES_BYTES


def _check_tensor(
    folder: Path,
    found: dict[str, StoredTensor],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
) -> None:
    """Take `name` out of `found` if it is right."""
    stored = found.pop(name, None)
    if stored is None:
        raise bad_file(folder, f"tensor {name} is missing")
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise bad_file(
            folder,
            f"tensor {name} is {stored.dtype} {list(stored.shape)}, not {dtype} {list(shape)}",
        )
    # NaN compares false.
    if dtype == _SCALE and not (stored.value is not None and 0 < stored.value < math.inf):
        raise bad_file(folder, f"{name} is {stored.value}: the source's weights are not sound")
