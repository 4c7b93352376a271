"""Linear layers, in the one form that is fast on each device.

On a CPU the weight is reordered once for oneDNN: a decode step then reads it at close to memory
speed, where `F.linear` takes twice as long for one row, and for a few rows more with each. The
operators are private to torch, so they are kept here and probed once; without them everything runs
on `F.linear`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

__all__ = ["Linear", "compute_dtype", "dtype_name", "padded", "pass_rows"]

_PACKED_FOR_ROWS = 4
"""The number of rows that oneDNN optimises the layout for: a few rows are where decoding lives."""


_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """What to compute in. name: `bfloat16`, `float32`, or `auto` for the first of them except on a
    CPU without instructions for it, where a pass over 32 rows takes three times as long in it."""
    if name == "auto":
        fit = device.type != "cpu" or _can_pack(device, torch.bfloat16)
        name = "bfloat16" if fit else "float32"
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What settings call it."""
    return str(dtype).removeprefix("torch.")


class Linear:
    """y = x Wᵀ + b with what follows it fused in. x: [tokens, in], W: [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight.device, weight.dtype)
        self._weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return _packed(x, self._weight, self._bias, "none")
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x Wᵀ + b)."""
        if self._packed:
            return _packed(x, self._weight, self._bias, "swish")
        return F.silu(F.linear(x, self._weight, self._bias))

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x Wᵀ + b) * other."""
        if self._packed:
            return _packed_binary(x, other, self._weight, self._bias, "mul")
        return F.linear(x, self._weight, self._bias) * other

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """(x Wᵀ + b) + other."""
        if self._packed:
            return _packed_binary(x, other, self._weight, self._bias, "add")
        return F.linear(x, self._weight, self._bias) + other


def pass_rows(tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """How many rows a pass over so many tokens is padded to; at most a quarter more.

    oneDNN compiles kernels for every number of rows it meets and never drops them all: without
    this a deployment grows by half a gigabyte as batches of every size come along, and each new
    size holds up its step for some milliseconds.
    """
    if not _can_pack(device, dtype):
        return tokens
    step = 1 << max((tokens - 1).bit_length() - 3, 0)  # four sizes from a power of 2 to the next
    return -(-tokens // step) * step


def padded(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, width] with rows of zeros after it, up to a size that linears know."""
    more = pass_rows(len(x), x.device, x.dtype) - len(x)
    return F.pad(x, (0, 0, 0, more)) if more else x


def _packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: str
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], "")
    return out


def _packed_binary(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operation: str,
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)
    return out


@functools.cache
def _can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's private packed operators exist here and agree with `F.linear`."""
    if device.type != "cpu" or dtype not in _DTYPES.values():
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.randn(32, 64, generator=generator).to(dtype)
    other = torch.randn(3, 32, generator=generator).to(dtype)
    plain = F.linear(x, weight)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        pairs = (
            (_packed(x, packed, None, "none"), plain),
            (_packed(x, packed, None, "swish"), F.silu(plain)),
            (_packed_binary(x, other, packed, None, "mul"), plain * other),
            (_packed_binary(x, other, packed, None, "add"), plain + other),
        )
    except (AttributeError, RuntimeError):
        return False
    return all(torch.allclose(got, want, rtol=0.05, atol=0.5) for got, want in pairs)
