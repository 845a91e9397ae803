"""DeBERTa on packed rows: the kernels against a plain computation and against transformers' own."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels_tiny import (
    FILLER,
    check_kept,
    in_the_interpreter,
    logits_and_gradients,
    packed,
    padded,
    relative_error,
    taken_shares,
)
from torch import Tensor

from trainfit.core.errors import BadInput
from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.kernels import disentangled
from trainfit.kernels.supported import model_obstacle

LENGTHS = (50, 200, 1, 130, 77, 160)
NO_DROPOUT = dict.fromkeys(("attention_dropout", "feed_forward_dropout", "head_dropout"), 0.0)
TINY = {
    "vocab_size": 90,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "position_buckets": 32,
    "max_relative_positions": 256,
    "max_position_embeddings": 256,
}


def deberta(path: str = "auto", **overrides: Any) -> EncoderClassifier:
    torch.manual_seed(0)
    model = build_classifier(
        ClassifierSettings(
            name="deberta-v3-base",
            classes=3,
            attention=path,
            overrides=TINY | overrides,
            **NO_DROPOUT,
        )
    )
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    starts: Tensor,
    longest: int,
    kept: Tensor | None = None,
) -> Tensor:
    """The formula, one sequence at a time; `kept` are dropout's factors."""
    found = []
    for begin, end in pairwise(starts.tolist()):
        token = torch.arange(end - begin, device=query.device)
        far = token[None, :] - token[:, None]
        asked, keys, values = (t[begin:end] for t in (query, key, value))
        scores = torch.einsum("ihd,jhd->hij", asked, keys)
        scores = scores + torch.einsum("ihd,ijhd->hij", asked, positions[0][far + longest - 1])
        scores = scores + torch.einsum("jhd,ijhd->hij", keys, positions[1][longest - 1 - far])
        shares = (0.2 * scores).softmax(-1)
        if kept is not None:
            shares = shares * kept[:, begin:end, : end - begin]
        found.append(torch.einsum("hij,jhd->ihd", shares, values))
    return torch.cat(found)


def check_dropout(attend: Any, tensors: list[Tensor], starts: Tensor, longest: int) -> None:
    """Compare with the formula under the same factors, which the kernel itself shows."""
    query, key, value, positions = tensors
    seeds = [torch.tensor([seed], device=query.device) for seed in (11, 12)]

    def shares(seed: Tensor | None, dropout: float) -> Tensor:
        return taken_shares(
            lambda v: attend(query, key, v, positions, starts, seed, longest, 0.2, dropout)[0],
            value,
            starts,
        ).detach()

    kept = check_kept(shares(None, 0.0), shares(seeds[0], 0.3), 0.3, 1e-4)
    sure = plain(*tensors, starts, longest, kept)
    found, _ = attend(*tensors, starts, seeds[0], longest, 0.2, 0.3)
    again, _ = attend(*tensors, starts, seeds[0], longest, 0.2, 0.3)
    other, _ = attend(*tensors, starts, seeds[1], longest, 0.2, 0.3)
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    slope = torch.randn_like(sure)
    wanted = torch.autograd.grad(sure, tensors, slope)
    got = torch.autograd.grad(found, tensors, slope)
    assert max(map(relative_error, (found, *got), (sure, *wanted))) < 1e-4


def inputs(
    lengths: tuple[int, ...], longest: int, heads: int, head: int, **how: Any
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(len(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(how.get("device", "cpu"))
    shapes = [(int(starts[-1]), heads, head)] * 3 + [(2, 2 * longest, heads, head)]
    return [torch.randn(shape, **how).requires_grad_() for shape in shapes], starts


def test_a_model_on_the_cpu_takes_its_own_code_and_refuses_the_kernel() -> None:
    batch = packed(LENGTHS, filler=20)
    own, _ = logits_and_gradients(deberta(), padded(batch))
    mixed, _ = logits_and_gradients(deberta(), batch)
    assert torch.allclose(mixed, own, atol=1e-5)
    with pytest.raises(BadInput, match="on the device cpu"):
        deberta("varlen")(**batch)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"pos_att_type": ["c2p"]}, "the terms c2p"),
        ({"relative_attention": False}, "no kernel here"),
        ({"conv_kernel_size": 3}, "convolution"),
        ({"num_attention_heads": 16}, "heads of 48"),
        ({"model_type": "deberta"}, "no kernel here"),
    ],
)
def test_which_models_it_takes(change: dict[str, Any], reason: str | None) -> None:
    config = deberta().encoder.config.to_dict() | {"hidden_size": 768, "num_attention_heads": 12}
    found = model_obstacle(config | change)
    assert found is None if reason is None else reason in str(found)


def test_which_batches_it_takes() -> None:
    config = deberta().encoder.config
    assert disentangled.obstacle(config, capability=None, longest=256) is None
    assert "257" in str(disentangled.obstacle(config, capability=(9, 0), longest=257))
    assert "8.0, not 7.5" in str(disentangled.obstacle(config, capability=(7, 5), longest=8))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_in_the_interpreter() -> None:
    """Triton can run its kernels in Python, in a process where nobody has imported it yet."""
    script = """
import torch
from kernels_tiny import relative_error
from test_kernels_disentangled import check_dropout, inputs, plain
from trainfit.kernels import disentangled_triton as kernels
kernels.BLOCK = 16
tensors, starts = inputs((5, 33, 0, 1, 40), 40, 2, 16)
sure = plain(*tensors, starts, 40)
slope = torch.randn_like(sure)
gradients = torch.autograd.grad(sure, tensors, slope)
given = [t.detach() for t in tensors]
out, sums = kernels.forward(*given, starts, None, 40, 0.2, 0.0)
found = kernels.backward(slope, *given, starts, None, out, sums, 40, 0.2, 0.0)
assert max(map(relative_error, (out, *found), (sure, *gradients))) < 1e-5

class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        *given, ctx.starts, ctx.seed, longest, scale, dropout = given
        ctx.numbers = longest, scale, dropout
        out, sums = kernels.forward(*given, ctx.starts, ctx.seed, *ctx.numbers)
        ctx.save_for_backward(*given, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx, slope, _):
        *given, out, sums = ctx.saved_tensors
        found = kernels.backward(slope, *given, ctx.starts, ctx.seed, out, sums, *ctx.numbers)
        return *found, *(None,) * 5

check_dropout(Kernel.apply, *inputs((5, 20, 0), 20, 2, 16), 20)
"""
    in_the_interpreter(script)


@pytest.mark.gpu
class TestOnGpu:
    """The compiled kernels."""

    @pytest.mark.parametrize(
        ("lengths", "head"),
        [((2,), 64), ((65, 0, 63), 64), ((5, 333, 0, 1, 512, 170, 128), 64), ((5, 333, 1), 128)],
    )
    def test_the_kernel_is_the_formula(self, lengths: tuple[int, ...], head: int) -> None:
        tensors, starts = inputs(lengths, 512, 3, head, device="cuda")
        sure = plain(*tensors, starts, 512)
        attend = disentangled.disentangled_attention
        found, _ = attend(*tensors, starts, None, 512, 0.2, 0.0)
        slope = torch.randn_like(sure)
        wanted = torch.autograd.grad(sure, tensors, slope)
        got = torch.autograd.grad(found, tensors, slope)
        assert relative_error(found, sure) < 1e-4
        for gradient, reference in zip(got, wanted, strict=True):
            assert relative_error(gradient, reference) < 1e-4
        check_dropout(attend, tensors, starts, 512)

    def test_the_model_is_transformers_own_in_float32(self) -> None:
        batch = packed(LENGTHS, filler=300, device="cuda")
        sure, wanted = logits_and_gradients(deberta().cuda(), padded(batch))
        found, got = logits_and_gradients(deberta("varlen").cuda(), batch)
        assert relative_error(found, sure) < 1e-4
        assert got.keys() == wanted.keys()
        for name, gradient in got.items():
            assert relative_error(gradient, wanted[name]) < 1e-4, name

    def test_as_near_to_float32_as_padded_rows_are(self) -> None:
        batch = packed(LENGTHS, filler=300, device="cuda")
        sure, wanted = logits_and_gradients(deberta().cuda(), padded(batch))
        with torch.autocast("cuda", torch.bfloat16):
            quick, slants = logits_and_gradients(deberta("varlen").cuda(), batch)
            plain_logits, slopes = logits_and_gradients(deberta().cuda(), padded(batch))
        assert relative_error(quick, sure) <= 2 * relative_error(plain_logits, sure)
        joined = [torch.cat([g.flatten() for g in x.values()]) for x in (slants, slopes, wanted)]
        assert relative_error(joined[0], joined[2]) <= 2 * relative_error(joined[1], joined[2])

    def test_it_compiles_in_one_piece_and_gives_the_same_bits_twice(self) -> None:
        batch = packed(LENGTHS, filler=300, device="cuda")
        model = deberta("varlen").cuda()
        for layer in model.encoder.encoder.layer:
            layer.compile(fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            first, gradients = logits_and_gradients(model, batch)
            second, again = logits_and_gradients(model, batch)
            eager, _ = logits_and_gradients(deberta("varlen").cuda(), batch)
        assert torch.equal(first, second)
        attention = [name for name in gradients if "attention" in name]
        assert all(torch.equal(gradients[name], again[name]) for name in attention)
        assert relative_error(first, eager) < 0.02

    def test_the_filler_gives_no_gradient(self) -> None:
        model = deberta("varlen").cuda()
        _, gradients = logits_and_gradients(model, packed(LENGTHS, filler=900, device="cuda"))
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        weight = model.encoder.get_input_embeddings().weight
        assert weight.grad is not None
        assert (weight.grad[FILLER] == 0).all()


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (32, 128), (8, 64), (256, 1024)])
def test_log_buckets_are_those_of_transformers(buckets: int, most: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    from trainfit.kernels.disentangled import log_buckets

    distances = torch.arange(-2000, 2001)
    expected = make_log_bucket_position(distances, buckets, most).long()
    assert torch.equal(log_buckets(distances, buckets, most), expected)
