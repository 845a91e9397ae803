"""AdamW with small moments: bitsandbytes' code, unbiased rounding, and torch's own update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainfit.kernels import fused_ops
from trainfit.kernels.fused_ops import BLOCK, adamw_8bit_, adamw_bf16_, coded, codes, decoded

CPU = torch.device("cpu")
FIXED = (0.9, 0.999, 1e-8, 0.1)


def numbers(count: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * scale


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_bitsandbytes_own(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    expected = functional.create_dynamic_map(signed=signed)
    assert torch.equal(torch.tensor(fused_ops.dynamic_map(signed=signed)), expected)


def test_blocks_are_coded_as_by_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    signed, _, lower, _ = codes(CPU)
    values = numbers(10 * BLOCK + 40) * torch.logspace(-3, 3, 10 * BLOCK + 40)
    found, scales = coded(values, lower)
    theirs, state = functional.quantize_blockwise(values, code=signed, blocksize=BLOCK)
    assert torch.equal(scales, state.absmax)
    apart = (signed[found.long()] - signed[theirs.long()]).abs()
    assert (found == theirs).float().mean() > 0.99  # numbers in the middle of two may go either way
    assert apart.max() < 0.02
    back = decoded(found, scales, signed)
    assert ((back - values).abs() <= scales.repeat_interleave(BLOCK)[: values.numel()] * 0.02).all()


def test_rounding_at_random_is_unbiased() -> None:
    """The mean of many roundings is the number itself, within four standard errors."""
    count = 1 << 18
    for value in (1.0 + 2**-10, -3.0 - 2**-9, 1e-20, 0.7):
        low = torch.tensor(value).view(torch.int32) & -0x10000
        below = low.view(torch.float32).item()
        above = (low + 0x10000).view(torch.float32).item()
        share = (value - below) / (above - below)
        for step, number in ((1, 0), (2, 0), (1, 1), (99_999, 199)):
            bits = fused_ops.random_bits(count, 0, torch.tensor(float(step)), number)
            for half in (bits, bits >> 16):
                rounded = fused_ops.rounded(torch.full((count,), value), half).float()
                assert set(rounded.tolist()) <= {below, above}
                up = (rounded == above).double().mean().item()
                assert abs(up - share) < 4 * math.sqrt(share * (1 - share) / count) + 2**-16


def test_what_is_a_bfloat16_stays_as_it_is() -> None:
    values = numbers(5000).bfloat16()
    bits = fused_ops.random_bits(5000, 0, torch.tensor(3.0), 7)
    assert torch.equal(fused_ops.rounded(values.float(), bits), values)


def test_random_bits_depend_on_the_step_the_weight_and_the_element_alone() -> None:
    def bits(count: int = 64, start: int = 0, step: float = 5.0, number: int = 3) -> list[int]:
        return fused_ops.random_bits(count, start, torch.tensor(step), number).tolist()

    assert bits() == bits()
    assert bits()[20:] == bits(44, start=20)
    others = [bits(step=6.0), bits(number=4), bits(start=64)]
    assert all(len(set(bits()) & set(other)) < 2 for other in others)
    many = torch.tensor(bits(1 << 16)).double()
    assert abs(many.mean() / 2**32 - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([many[1:], many[:-1]]))[0, 1]) < 0.02


def update(kind: str, weight: Tensor, gradient: Tensor, state: dict[str, Any], step: int) -> None:
    counts, rate, none = torch.tensor([float(step)]), torch.tensor(0.01), torch.tensor(0.0)
    if kind == "8bit":
        moments = [[state[name]] for name in ("m", "ms", "v", "vs")]
        adamw_8bit_([weight], [gradient], *moments, counts, rate, none, *FIXED)
    else:
        moments = [[state["m"]], [state["v"]]]
        adamw_bf16_([weight], [gradient], *moments, [0], [0], counts, rate, none, *FIXED)


def empty(kind: str, count: int) -> dict[str, Tensor]:
    if kind != "8bit":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
        return {"m": torch.zeros(count, dtype=dtype), "v": torch.zeros(count, dtype=dtype)}
    blocks = -(-count // BLOCK)
    made = {name: torch.zeros(count, dtype=torch.uint8) for name in ("m", "v")}
    return made | {"ms": torch.zeros(blocks), "vs": torch.zeros(blocks)}


@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
def test_the_first_update_is_torchs(kind: str) -> None:
    """It needs no moments of earlier steps; with float32 ones all others are torch's too."""
    count = 3 * BLOCK + 17
    weight, ours = (torch.nn.Parameter(numbers(count)) for _ in range(2))
    reference = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.999), weight_decay=0.1)
    state = empty(kind, count)
    for step in range(1, 30 if kind == "fp32" else 2):
        weight.grad = numbers(count, seed=step, scale=0.1)
        reference.step()
        with torch.no_grad():
            update(kind, ours, weight.grad, state, step)
        torch.testing.assert_close(ours, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_nothing_changes_where_gradients_are_not_finite(kind: str) -> None:
    count = 2 * BLOCK
    weight, state = numbers(count), empty(kind, count)
    update(kind, weight, numbers(count, seed=1), state, 1)
    before = [tensor.clone() for tensor in (weight, *state.values())]
    bad = torch.full((count,), math.nan)
    args = (torch.tensor([2.0]), torch.tensor(0.01), torch.tensor(1.0), *FIXED)
    if kind == "8bit":
        moments = [[state[name]] for name in ("m", "ms", "v", "vs")]
        adamw_8bit_([weight], [bad], *moments, *args)
    else:
        adamw_bf16_([weight], [bad], [state["m"]], [state["v"]], [0], [0], *args)
    assert all(map(torch.equal, before, (weight, *state.values())))


def test_a_second_moment_is_never_coded_as_zero() -> None:
    """A gradient a million times smaller than its block's largest must not divide by zero."""
    count = BLOCK
    weight, state = torch.zeros(count), empty("8bit", count)
    gradient = torch.full((count,), 1e-6)
    gradient[0] = 1.0
    update("8bit", weight, gradient, state, 1)
    assert state["v"].min() > 0
    update("8bit", weight, gradient * 0, state, 2)
    assert weight.abs().max() < 0.05  # twice the learning rate and some


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_a_transposed_weight_is_updated_in_its_own_layout(kind: str) -> None:
    plain, turned = (
        numbers(32 * 24).view(32, 24),
        numbers(32 * 24).view(32, 24).t().contiguous().t(),
    )
    gradient = numbers(32 * 24, seed=1).view(32, 24)
    for weight in (plain, turned):
        state = empty(kind, weight.numel())
        state = {n: torch.zeros_like(weight, dtype=t.dtype) if n in "mv" else t
                 for n, t in state.items()}  # fmt: skip
        update(kind, weight, gradient, state, 1)
    torch.testing.assert_close(plain, turned, rtol=1e-6, atol=1e-7)


def on_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("count", [1, 255, 5000, 1 << 20])
def test_the_kernel_does_what_the_formula_does(kind: str, count: int) -> None:
    ours, theirs = numbers(count), numbers(count).cuda()
    state = empty(kind, count)
    on = on_gpu(state)
    device = theirs.device
    for step in range(1, 6):
        gradient = numbers(count, seed=step, scale=0.1)
        update(kind, ours, gradient, state, step)
        scalars = (torch.tensor([float(step)], device=device), torch.tensor(0.01, device=device))
        none = torch.zeros((), device=device)
        if kind == "8bit":
            moments = [[on[name]] for name in ("m", "ms", "v", "vs")]
            adamw_8bit_([theirs], [gradient.cuda()], *moments, *scalars, none, *FIXED)
        else:
            rest = ([on["m"]], [on["v"]], [0], [0])
            adamw_bf16_([theirs], [gradient.cuda()], *rest, *scalars, none, *FIXED)
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-4, atol=2e-4)
    for name in ("m", "v"):
        if kind == "fp32":
            torch.testing.assert_close(on[name].cpu(), state[name], rtol=1e-5, atol=1e-8)
        else:
            assert (on[name].cpu() == state[name]).float().mean() > 0.999
