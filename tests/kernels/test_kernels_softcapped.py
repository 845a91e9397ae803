"""Soft-capped attention on packed rows against the formula, and a model against its masked path."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels_tiny import in_the_interpreter, logits_and_gradients, packed, tiny
from torch import Tensor

from trainfit.kernels.varlen import softcapped_attention


def plain(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, cap: float, window: int
) -> Tensor:
    """The formula, one sequence at a time, with a scale of 0.5."""
    found = []
    groups = query.shape[1] // key.shape[1]
    for begin, end in pairwise(starts.tolist()):
        keys, values = (t[begin:end].repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query[begin:end], keys) * 0.5
        token = torch.arange(end - begin, device=query.device)
        far = (token[:, None] - token[None, :]).abs() >= window
        scores = (cap * torch.tanh(scores / cap)).masked_fill(far, -torch.inf)
        found.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(found)


def inputs(
    lengths: tuple[int, ...], heads: tuple[int, int], head: int, **how: Any
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(len(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(how.get("device", "cpu"))
    shapes = [(int(starts[-1]), count, head) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, **how).requires_grad_() for shape in shapes], starts


def relative_error(found: Tensor, sure: Tensor) -> float:
    found, sure = found.double(), sure.double()
    return (torch.linalg.norm(found - sure) / torch.linalg.norm(sure)).item()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("window", [40, 7])
def test_the_kernels_in_the_interpreter(window: int) -> None:
    """Triton can run its kernels in Python, in a process where nobody has imported it yet."""
    script = f"""
import torch
from test_kernels_softcapped import inputs, plain, relative_error
from trainfit.kernels import softcapped_triton as kernels
kernels.BLOCK[16] = 16
tensors, starts = inputs((5, 33, 0, 1, 40), (4, 2), 16)
sure = plain(*tensors, starts, 3.0, {window})
slope = torch.randn_like(sure)
gradients = torch.autograd.grad(sure, tensors, slope)
given = [t.detach() for t in tensors]
out, sums = kernels.forward(*given, starts, 40, 0.5, 3.0, {window})
found = kernels.backward(slope, *given, starts, out, sums, 40, 0.5, 3.0, {window})
assert max(map(relative_error, (out, *found), (sure, *gradients))) < 1e-5
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
        found, _ = softcapped_attention(*tensors, starts, 512, 0.5, 5.0, window)
        slope = torch.randn_like(sure)
        wanted = torch.autograd.grad(sure, tensors, slope)
        got = torch.autograd.grad(found, tensors, slope)
        assert relative_error(found, sure) < 1e-4
        for gradient, reference in zip(got, wanted, strict=True):
            assert relative_error(gradient, reference) < 1e-4

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
