"""The real kernel against the masked reference in float32, and against padded half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_tiny import FILLER, TINY, logits_and_gradients, packed, padded, tiny
from torch import Tensor

from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.kernels import attention
from trainfit.kernels.attention import lay_out, masked_attention
from trainfit.kernels.varlen import VarlenAttention, varlen_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_enough")]
LENGTHS = (50, 200, 1, 130, 77, 160)
BF16 = torch.bfloat16


def on_gpu(name: str, path: attention.Path) -> EncoderClassifier:
    return tiny(name, attention=path).cuda()


def in_bf16(model: EncoderClassifier, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cuda", BF16):
        return logits_and_gradients(model, batch)


def hidden_states(model: EncoderClassifier, batch: dict[str, Any]) -> Tensor:
    with torch.autocast("cuda", BF16), torch.no_grad():
        return model.encode(batch["input_ids"], lay_out(**batch))[0]


def distance(one: Tensor, other: Tensor) -> float:
    return torch.linalg.norm(one.double() - other.double()).item()


@pytest.mark.parametrize("name", TINY)
def test_as_near_to_float32_as_padded_rows_are(name: str) -> None:
    batch = packed(LENGTHS, filler=300, device="cuda")
    logits, gradients = logits_and_gradients(on_gpu(name, "masked"), batch)
    quick, slants = in_bf16(on_gpu(name, "varlen"), batch)
    plain, slopes = in_bf16(on_gpu(name, "auto"), padded(batch))
    assert distance(quick, logits) <= 2 * distance(plain, logits)
    assert slants.keys() == slopes.keys() == gradients.keys()
    whole = torch.linalg.norm(torch.cat([g.flatten() for g in gradients.values()])).item()
    for part, gradient in gradients.items():
        near, far = distance(slants[part], gradient), distance(slopes[part], gradient)
        assert near <= 2 * far + 1e-3 * whole, part
    joined = [torch.cat([g.flatten() for g in all_.values()]) for all_ in (slants, slopes)]
    exact = torch.cat([g.flatten() for g in gradients.values()])
    assert distance(joined[0], exact) <= 2 * distance(joined[1], exact)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 2, 17])
def test_the_kernel_is_the_masked_reference(
    heads: tuple[int, int], head: int, window: int | None
) -> None:
    starts = torch.tensor([0, 50, 50, 250, 251, 251], dtype=torch.int32, device="cuda")
    layout = lay_out(
        torch.zeros(1, 700, dtype=torch.long, device="cuda"), cu_seqlens=starts, max_seqlen=200
    )
    torch.manual_seed(0)
    parts = [
        torch.randn(1, count, 700, head, device="cuda", dtype=BF16)
        for count in (heads[0], heads[1], heads[1])
    ]
    weights = torch.randn(1, 251, heads[0], head, device="cuda")
    call: dict[str, Any] = {"scaling": head**-0.5, "dropout": 0.0, "softcap": None}
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    results = []
    for made, dtype in (
        (masked_attention(layout, window), torch.float32),
        (varlen_attention(layout, window, BF16), BF16),
    ):
        inputs = [part.to(dtype).requires_grad_() for part in parts]
        out = made(module, *inputs, windowed=True, **call)
        assert out.isfinite().all()
        found = torch.autograd.grad((out[:, :251].float() * weights).sum(), inputs)
        results.append([out[:, :251], *found])
    for sure, quick in zip(*results, strict=True):
        assert distance(quick, sure) <= 0.01 * torch.linalg.norm(sure.double()).item()
    assert all((gradient[:, :, 251:] == 0).all() for gradient in results[1][1:])


@pytest.mark.parametrize("name", TINY)
def test_one_sequence_never_changes_another(name: str) -> None:
    model = on_gpu(name, "varlen").eval()
    batch = packed(LENGTHS, filler=300, device="cuda")
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 50:250] = 7
    other["input_ids"][0, sum(LENGTHS) :] = 8
    before, after = hidden_states(model, batch), hidden_states(model, other)
    assert torch.equal(before[:50], after[:50])
    assert torch.equal(before[250 : sum(LENGTHS)], after[250 : sum(LENGTHS)])
    assert (before[50:250] != after[50:250]).any(-1).all()


@pytest.mark.parametrize("name", TINY)
def test_the_filler_gives_no_gradient(name: str) -> None:
    model = on_gpu(name, "varlen")
    _, gradients = in_bf16(model, packed(LENGTHS, filler=900, device="cuda"))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    embedding = model.encoder.get_input_embeddings().weight.grad
    assert (embedding[FILLER] == 0).all()
    assert (embedding[2:FILLER] != 0).any()


def test_auto_takes_flash_in_half_precision_and_else_the_memory_efficient_kernel() -> None:
    layout = lay_out(**packed(LENGTHS, device="cuda"))
    asked: dict[str, Any] = {"dtype": torch.float32, "head": 64}

    def kernel(window: int | None = None) -> str | None:
        made = attention.choose(layout, window, **asked)
        return made.kernel if isinstance(made, VarlenAttention) else None

    assert kernel() == "varlen_efficient"
    assert kernel(window=9) is None
    with torch.autocast("cuda", torch.float16):
        assert kernel(window=9) == "varlen"
    asked["dtype"] = BF16
    assert kernel() == "varlen"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("bert-base", "auto"),
        ("bert-base", "masked"),
        ("bert-base", "varlen_efficient"),
        ("gemma-3-1b-it", "auto"),
    ],
)
def test_compiled_it_is_the_same(name: str, path: attention.Path) -> None:
    batch = packed(LENGTHS, filler=44, device="cuda")
    model = on_gpu(name, path)
    exact = torch.cat([g.flatten() for g in logits_and_gradients(model, batch)[1].values()])
    eager = in_bf16(model, batch)[1]
    compiled = in_bf16(torch.compile(model, fullgraph=True), batch)[1]
    joined = [torch.cat([g.flatten() for g in found.values()]) for found in (eager, compiled)]
    assert joined[0].shape == joined[1].shape == exact.shape
    assert distance(joined[1], exact) <= 2 * distance(joined[0], exact)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_waits_for_the_gpu(dropout: float) -> None:
    batch = packed(LENGTHS, filler=44, device="cuda")
    shape = (1, 4, batch["input_ids"].shape[1], 64)
    part = torch.randn(shape, device="cuda", requires_grad=True)
    call: dict[str, Any] = {"scaling": None, "dropout": dropout, "windowed": True, "softcap": None}
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", BF16):
            made = attention.choose(
                lay_out(**batch), 9, path="varlen", dtype=torch.float32, head=64
            )
            made(torch.nn.Module(), part, part, part, **call).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert part.grad is not None
