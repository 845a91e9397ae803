"""GELU's own kernels against torch's in float64, values and slopes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from kernels_tiny import in_the_interpreter
from torch.nn import functional

from trainfit.kernels import varlen
from trainfit.kernels.fused_ops import gelu

POINTS = torch.linspace(-12, 12, 4001)


def sure() -> tuple[torch.Tensor, torch.Tensor]:
    """Values and slopes in float64."""
    x = POINTS.double().requires_grad_()
    y = functional.gelu(x)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), slopes


def test_on_a_cpu_it_is_torchs_own() -> None:
    x = POINTS.double().requires_grad_()
    values, slopes = sure()
    assert torch.equal(gelu(x), values)
    assert torch.equal(torch.autograd.grad(gelu(x).sum(), x)[0], slopes)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_formula_in_the_interpreter_is_exact_to_float32() -> None:
    in_the_interpreter("""
import torch
from test_kernels_gelu import POINTS, sure
from trainfit.kernels import gelu_triton as kernels
values, slopes = sure()
torch.testing.assert_close(kernels.forward(POINTS).double(), values, rtol=0, atol=1e-6)
given = torch.linspace(-3, 3, len(POINTS))
found = kernels.backward(given, POINTS).double()
torch.testing.assert_close(found, slopes * given.double(), rtol=0, atol=3e-6)
assert kernels.forward(POINTS[:0]).shape == (0,)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_as_near_as_the_dtype_allows(dtype: torch.dtype, compiled: bool) -> None:
    x = POINTS.to("cuda", dtype)
    wide = x.double().requires_grad_()
    values = functional.gelu(wide)
    (slopes,) = torch.autograd.grad(values.sum(), wide)
    x.requires_grad_()
    found = (torch.compile(gelu) if compiled else gelu)(x)
    (own,) = torch.autograd.grad(found.sum(), x)
    near = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), values, rtol=near, atol=1e-6)
    torch.testing.assert_close(own.double(), slopes, rtol=near, atol=1e-6)
    assert found.dtype == own.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "capability", "own"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (7, 5), False),
        (torch.float16, (7, 0), True),
        (torch.float16, (6, 1), False),
    ],
)
def test_gpus_that_triton_makes_no_kernels_for_take_torchs_own(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], own: bool
) -> None:
    monkeypatch.setattr(varlen, "triton_exists", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert varlen.triton_takes(torch.zeros(1, dtype=dtype)) is own
