from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from draftgate.engine import linear as linear_module
from draftgate.engine.linear import Linear, compute_dtype

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)]
)


@pytest.fixture
def unpackable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build of torch whose private operators fail."""

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("not built with oneDNN")

    linear_module._can_pack.cache_clear()
    monkeypatch.setattr(linear_module, "_packed", refuse)
    yield
    linear_module._can_pack.cache_clear()


def check_all_forms(dtype: torch.dtype, rows: int, bias: bool, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    weight = (torch.randn(48, 64, generator=generator) / 8).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    other = torch.randn(rows, 48, generator=generator).to(dtype)
    layer = Linear(weight, offset)
    plain = F.linear(x.double(), weight.double(), offset.double() if bias else None)  # type: ignore[union-attr]
    for got, wanted in (
        (layer(x), plain),
        (layer.silu(x), F.silu(plain)),
        (layer.times(x, other), plain * other.double()),
        (layer.plus(x, other), plain + other.double()),
    ):
        assert got.dtype == dtype
        assert got.shape == (rows, 48)
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 160])
@DTYPES
def test_every_form_is_the_plain_formula(
    dtype: torch.dtype, tolerance: float, rows: int, bias: bool
) -> None:
    check_all_forms(dtype, rows, bias, tolerance)


def test_float32_is_packed_on_every_cpu() -> None:
    """torch's operators for it need no instructions that some lack."""
    assert linear_module._can_pack(CPU, torch.float32)


@pytest.mark.usefixtures("unpackable")
@pytest.mark.parametrize("bias", [False, True])
@DTYPES
def test_without_the_packed_operators_it_falls_back(
    dtype: torch.dtype, tolerance: float, bias: bool
) -> None:
    assert not linear_module._can_pack(CPU, dtype)
    check_all_forms(dtype, 3, bias, tolerance)


@DTYPES
def test_packed_operators_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    real = linear_module._packed
    linear_module._can_pack.cache_clear()
    monkeypatch.setattr(linear_module, "_packed", lambda *given: real(*given) + 3.0)
    assert not linear_module._can_pack(CPU, dtype)
    linear_module._can_pack.cache_clear()
    check_all_forms(dtype, 3, True, tolerance)


@pytest.mark.parametrize("packs", [False, True])
def test_it_computes_in_bfloat16_by_itself_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    monkeypatch.setattr(linear_module, "_can_pack", lambda device, dtype: packs)
    assert compute_dtype("auto", CPU) is (torch.bfloat16 if packs else torch.float32)
    assert compute_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert compute_dtype("bfloat16", CPU) is torch.bfloat16
    assert compute_dtype("float32", torch.device("cuda")) is torch.float32
