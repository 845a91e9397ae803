"""Attention dropout in the kernels for packed rows: its mask, its gradient, and when it repeats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels_tiny import (
    check_kept,
    logits_and_gradients,
    packed,
    relative_error,
    taken_shares,
    tiny,
)
from test_kernels_disentangled import TINY as TINY_DEBERTA
from torch import Tensor

from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.kernels import varlen
from trainfit.kernels.attention import lay_out
from trainfit.kernels.disentangled import disentangled_attention
from trainfit.kernels.varlen import VarlenAttention, softcapped_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_enough")]
LENGTHS = (50, 200, 1, 130, 77, 160)
BF16 = torch.bfloat16


# ── the flash kernel against the formula under its own mask ───────────────────────────────────


def plain(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, reach: int, kept: Tensor):
    """The formula in float32, one sequence at a time."""
    found = []
    groups = query.shape[1] // key.shape[1]
    for begin, end in pairwise(starts.tolist()):
        keys, values = (t[begin:end].repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query[begin:end], keys) * 0.1
        token = torch.arange(end - begin, device=query.device)
        far = (token[:, None] - token[None, :]).abs() > reach
        shares = scores.masked_fill(far, -torch.inf).softmax(-1)
        shares = shares * kept[:, begin:end, : end - begin]
        found.append(torch.einsum("hij,jhd->ihd", shares, values))
    return torch.cat(found)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("window", [None, 17])
def test_flash_drops_shares_and_its_gradient_knows_which(
    heads: tuple[int, int], head: int, window: int | None
) -> None:
    layout = lay_out(**packed(LENGTHS, device="cuda"))
    starts = varlen.starts_of(layout)[: len(LENGTHS) + 1]
    made = VarlenAttention(starts, 200, window, BF16)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), count, head, device="cuda", dtype=BF16, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )
    call: dict[str, Any] = {"scaling": 0.1, "windowed": window is not None, "softcap": None}

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        torch.cuda.manual_seed(5)
        inputs = [part.transpose(0, 1)[None] for part in (q, k, v)]
        return made(torch.nn.Module(), *inputs, dropout=dropout, **call)[0]

    def shares(dropout: float) -> Tensor:
        with torch.no_grad():
            return taken_shares(lambda v: attend(query, key, v, dropout), value, starts)

    kept = check_kept(shares(0.0), shares(0.3), 0.3, 0.02)
    exact = [part.detach().float().requires_grad_() for part in (query, key, value)]
    sure = plain(*exact, starts, 10**6 if window is None else window - 1, kept)
    slope = torch.randn_like(sure)
    wanted = torch.autograd.grad(sure, exact, slope)
    found = attend(query, key, value, 0.3)
    got = torch.autograd.grad(found, (query, key, value), slope.to(BF16))
    assert max(map(relative_error, (found, *got), (sure, *wanted))) < 0.02


# ── all kernels, in CUDA graphs ───────────────────────────────────────────────────────────────


def inputs_of(kind: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Query, key and value (and positions) of a kernel, and the kernel with dropout 0.5."""
    starts = torch.tensor([0, 50, 250, 251, 381], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    shapes = [(381, 2, 64)] * 3 + [(2, 400, 2, 64)] * (kind == "disentangled")
    tensors = [
        torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes
    ]

    def attend(*given: Tensor) -> Tensor:
        if kind == "flash":
            made = VarlenAttention(starts, 200, None, BF16)
            parts = [part.transpose(0, 1)[None] for part in given]
            call: dict[str, Any] = {"scaling": 0.1, "windowed": False, "softcap": None}
            return made(torch.nn.Module(), *parts, dropout=0.5, **call)[0]
        seed = varlen.draw_seed(given[0].device)
        if kind == "softcapped":
            return softcapped_attention(*given, starts, seed, 200, 0.1, 5.0, 200, 0.5)[0]
        return disentangled_attention(*given, starts, seed, 200, 0.1, 0.5)[0]

    return tensors, attend


@pytest.mark.parametrize("kind", ["flash", "softcapped", "disentangled"])
def test_replays_draw_anew_and_repeat_with_the_seed(kind: str) -> None:
    tensors, attend = inputs_of(kind)

    def step() -> tuple[Tensor, Tensor]:
        out = attend(*tensors)
        return out, torch.autograd.grad(out.sum(), tensors)[2]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile the kernels before the capture
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, slope = step()
    found = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        for _ in range(2):
            graph.replay()
            found.append(out.clone())
            # The output is linear in the values: only the forward pass's own mask gives this.
            total = (slope.double() * tensors[2].double()).sum()
            torch.testing.assert_close(out.double().sum(), total, rtol=0.05, atol=2.0)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    torch.cuda.manual_seed(3)
    assert torch.equal(step()[0], found[0])  # as without the graph


# ── models ────────────────────────────────────────────────────────────────────────────────────


def model_of(kind: str, dropout: float, **settings: Any) -> EncoderClassifier:
    settings |= {"attention": "varlen", "attention_dropout": dropout}
    if kind != "disentangled":
        cap = 5.0 if kind == "softcapped" else None
        name = "gemma-3-1b-it" if kind == "softcapped" else "bert-base"
        return tiny(name, softcap=cap, **settings).cuda()
    torch.manual_seed(0)
    none = {"feed_forward_dropout": 0.0, "head_dropout": 0.0, "overrides": TINY_DEBERTA}
    chosen = none | {"name": "deberta-v3-base", "classes": 3} | settings
    return build_classifier(ClassifierSettings(**chosen)).cuda()


def trained(model: EncoderClassifier, seed: int) -> tuple[Tensor, Tensor]:
    torch.cuda.manual_seed(seed)
    batch = packed(LENGTHS, filler=44, device="cuda")
    with torch.autocast("cuda", BF16):
        logits, gradients = logits_and_gradients(model, batch)
    return logits, torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("kind", ["flash", "softcapped", "disentangled"])
def test_a_model_drops_in_training_alone_and_repeats_with_the_seed(kind: str) -> None:
    model, without = model_of(kind, 0.4), model_of(kind, 0.0)
    # Not equal: matrix products may be rounded otherwise in another call.
    assert relative_error(trained(model.eval(), 1)[0], trained(without, 1)[0]) < 5e-4
    first, slopes = trained(model.train(), 1)
    again, _ = trained(model, 1)
    other, _ = trained(model, 2)
    assert torch.equal(first, again)
    assert relative_error(other, first) > 1e-3
    # Blocks that are computed again must drop the same.
    rebuilt, same = trained(model_of(kind, 0.4, checkpointing="full"), 1)
    assert torch.equal(rebuilt, first)
    assert relative_error(same, slopes) < 0.01


@pytest.mark.parametrize("kind", ["flash", "softcapped", "disentangled"])
def test_compiled_it_drops_too(kind: str) -> None:
    model = model_of(kind, 0.4)
    if kind == "disentangled":
        for layer in model.encoder.encoder.layer:
            layer.compile(fullgraph=True)
    compiled: Any = model if kind == "disentangled" else torch.compile(model, fullgraph=True)
    first, slopes = trained(compiled, 1)
    again, _ = trained(compiled, 1)
    other, _ = trained(compiled, 2)
    assert slopes.isfinite().all()
    assert torch.equal(first, again)
    assert relative_error(other, first) > 1e-3
