"""The loss and its slopes against torch's cross-entropy in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from kernels_tiny import in_the_interpreter
from torch import Tensor
from torch.nn import functional

from trainfit.kernels.fused_ops import IGNORED, loss_and_slopes


def made(rows: int, classes: int, *, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits in float32, and targets of which some do not count."""
    torch.manual_seed(seed)
    logits = spread * torch.randn(rows, classes)
    targets = torch.randint(0, classes, (rows,))
    targets[::3] = IGNORED
    return logits, targets


def sure(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.detach().double().requires_grad_()
    loss = functional.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORED)
    (slopes,) = torch.autograd.grad(loss, wide)
    return loss.detach(), slopes


@settings(max_examples=50)
@given(
    rows=some.integers(1, 9),
    classes=some.integers(1, 70),
    spread=some.floats(0, 200),
    seed=some.integers(0, 99),
)
def test_the_formula(rows: int, classes: int, spread: float, seed: int) -> None:
    logits, targets = made(rows, classes, spread=spread, seed=seed)
    logits = logits.double()
    for found, wanted in zip(loss_and_slopes(logits, targets), sure(logits, targets), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("classes", "spread"), [(5, 1.0), (64, 60.0), (70, 3.0), (200, 1.0)])
def test_the_kernel_in_the_interpreter(classes: int, spread: float) -> None:
    """Fewer classes than a block, exactly one, and several of which the last is not full."""
    in_the_interpreter(f"""
import torch
from test_kernels_cross_entropy import made, sure
from trainfit.kernels import cross_entropy_triton as kernels
kernels.BLOCK = 64
logits, targets = made(7, {classes}, spread={spread}, seed=1)
losses, slopes = kernels.losses_and_slopes(logits, targets)
loss, wanted = sure(logits, targets)
torch.testing.assert_close(losses.sum().double(), loss, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(slopes.double(), wanted, rtol=1e-5, atol=1e-6)
assert not slopes[::3].any() and not losses[::3].any()
logits[:, -1] = 900.0 / 4  # far above the first block: the sum of the others' exponents overflows
losses, slopes = kernels.losses_and_slopes(logits, targets)
loss, wanted = sure(logits, targets)
torch.testing.assert_close(losses.sum().double(), loss, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(slopes.double(), wanted, rtol=1e-5, atol=1e-6)
every_second = logits.repeat_interleave(2, 0)[::2]
assert torch.equal(kernels.losses_and_slopes(every_second, targets)[1], slopes)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("classes", [50304, 50257, 100])
def test_on_a_gpu_it_is_as_near_as_the_dtype_allows(classes: int, compiled: bool) -> None:
    logits, targets = made(300, classes, spread=4.0, seed=0)
    logits[7, -1] = 300.0  # far above all others, in the last block
    logits, targets = logits.to("cuda", torch.bfloat16), targets.cuda()
    work = torch.compile(loss_and_slopes) if compiled else loss_and_slopes
    loss, slopes = work(logits, targets)
    true_loss, true_slopes = sure(logits, targets)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(slopes.double(), true_slopes, rtol=2**-8, atol=1e-7)
    assert slopes.dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_logit_that_is_not_a_number_shows_in_the_loss() -> None:
    logits = torch.zeros(4, 9000, device="cuda", dtype=torch.bfloat16)
    logits[1, 8500] = torch.nan
    loss, _ = loss_and_slopes(logits, torch.zeros(4, dtype=torch.int64, device="cuda"))
    assert loss.isnan()
