"""Soft-capped attention on packed rows against the formula, and a model against its masked path."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels_tiny import (
    check_kept,
    in_the_interpreter,
    logits_and_gradients,
    packed,
    relative_error,
    taken_shares,
    tiny,
)
from torch import Tensor

from trainfit.kernels.varlen import softcapped_attention


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    cap: float,
    window: int,
    kept: Tensor | None = None,
) -> Tensor:
    """The formula, one sequence at a time, with a scale of 0.5; `kept` are dropout's factors."""
    found = []
    groups = query.shape[1] // key.shape[1]
    for begin, end in pairwise(starts.tolist()):
        keys, values = (t[begin:end].repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query[begin:end], keys) * 0.5
        token = torch.arange(end - begin, device=query.device)
        far = (token[:, None] - token[None, :]).abs() >= window
        scores = (cap * torch.tanh(scores / cap)).masked_fill(far, -torch.inf)
        shares = scores.softmax(-1)
        if kept is not None:
            shares = shares * kept[:, begin:end, : end - begin]
        found.append(torch.einsum("hij,jhd->ihd", shares, values))
    return torch.cat(found)


def inputs(
    lengths: tuple[int, ...], heads: tuple[int, int], head: int, **how: Any
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(len(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(how.get("device", "cpu"))
    shapes = [(int(starts[-1]), count, head) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, **how).requires_grad_() for shape in shapes], starts


def check_dropout(
    attend: Any, tensors: list[Tensor], starts: Tensor, longest: int, cap: float, window: int
) -> None:
    """Compare with the formula under the same factors, which the kernel itself shows."""
    query, key, value = tensors
    seeds = [torch.tensor([seed], device=query.device) for seed in (11, 12)]
    numbers = (longest, 0.5, cap, window)

    def shares(seed: Tensor | None, dropout: float) -> Tensor:
        return taken_shares(
            lambda v: attend(query, key, v, starts, seed, *numbers, dropout)[0], value, starts
        ).detach()

    kept = check_kept(shares(None, 0.0), shares(seeds[0], 0.3), 0.3, 1e-4)
    sure = plain(*tensors, starts, cap, window, kept)
    found, _ = attend(*tensors, starts, seeds[0], *numbers, 0.3)
    again, _ = attend(*tensors, starts, seeds[0], *numbers, 0.3)
    other, _ = attend(*tensors, starts, seeds[1], *numbers, 0.3)
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    slope = torch.randn_like(sure)
    wanted = torch.autograd.grad(sure, tensors, slope)
    got = torch.autograd.grad(found, tensors, slope)
    assert max(map(relative_error, (found, *got), (sure, *wanted))) < 1e-4


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("window", [40, 7])
def test_the_kernels_in_the_interpreter(window: int) -> None:
    """Triton can run its kernels in Python, in a process where nobody has imported it yet."""
    script = f"""
import torch
from kernels_tiny import relative_error
from test_kernels_softcapped import check_dropout, inputs, plain
from trainfit.kernels import softcapped_triton as kernels
kernels.BLOCK[16] = 16
tensors, starts = inputs((5, 33, 0, 1, 40), (4, 2), 16)
sure = plain(*tensors, starts, 3.0, {window})
slope = torch.randn_like(sure)
gradients = torch.autograd.grad(sure, tensors, slope)
given = [t.detach() for t in tensors]
numbers = (40, 0.5, 3.0, {window})
out, sums = kernels.forward(*given, starts, None, *numbers, 0.0)
found = kernels.backward(slope, *given, starts, None, out, sums, *numbers, 0.0)
assert max(map(relative_error, (out, *found), (sure, *gradients))) < 1e-5

class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        *given, ctx.starts, ctx.seed, longest, scale, cap, window, dropout = given
        ctx.numbers = longest, scale, cap, window, dropout
        out, sums = kernels.forward(*given, ctx.starts, ctx.seed, *ctx.numbers)
        ctx.save_for_backward(*given, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx, slope, _):
        *given, out, sums = ctx.saved_tensors
        found = kernels.backward(slope, *given, ctx.starts, ctx.seed, out, sums, *ctx.numbers)
        return *found, *(None,) * 7

check_dropout(Kernel.apply, *inputs((5, 20, 0), (4, 2), 16), 20, 3.0, {window})
"""
    in_the_interpreter(script)


@pytest.mark.gpu
class TestOnGpu:
    """The compiled kernels."""

    @pytest.mark.parametrize(
        ("heads", "head", "window"), [((4, 4), 64, 512), ((4, 2), 64, 50), ((2, 1), 256, 512)]
    )
    def test_the_kernel_is_the_formula(
        self, heads: tuple[int, int], head: int, window: int
    ) -> None:
        tensors, starts = inputs((5, 333, 0, 1, 512, 170), heads, head, device="cuda")
        sure = plain(*tensors, starts, 5.0, window)
        found, _ = softcapped_attention(*tensors, starts, None, 512, 0.5, 5.0, window, 0.0)
        slope = torch.randn_like(sure)
        wanted = torch.autograd.grad(sure, tensors, slope)
        got = torch.autograd.grad(found, tensors, slope)
        assert relative_error(found, sure) < 1e-4
        for gradient, reference in zip(got, wanted, strict=True):
            assert relative_error(gradient, reference) < 1e-4
        check_dropout(softcapped_attention, tensors, starts, 512, 5.0, window)

    def test_a_model_is_as_near_to_float32_as_its_masked_path(self) -> None:
        batch = packed((50, 200, 1, 130), filler=100, device="cuda")
        sure, wanted = logits_and_gradients(
            tiny("gemma-3-1b-it", softcap=5.0, attention="masked").cuda(), batch
        )
        errors = []
        for path in ("varlen", "masked"):
            model = tiny("gemma-3-1b-it", softcap=5.0, attention=path).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                logits, gradients = logits_and_gradients(model, batch)
            joined = [torch.cat([g.flatten() for g in x.values()]) for x in (gradients, wanted)]
            errors.append((relative_error(logits, sure), relative_error(*joined)))
        assert errors[0][0] <= 2 * errors[1][0]
        assert errors[0][1] <= 2 * errors[1][1]
