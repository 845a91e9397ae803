"""Activations in pinned host memory on a real GPU: the same bits in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_tiny import packed
from torch import Tensor

from trainfit.engine.step import accumulate
from trainfit.jobs.models.classifier import build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings
from trainfit.jobs.probes import loss
from trainfit.kernels.saved_on_host import SavedOnHost
from trainfit.measuring.profiled_step import gather
from trainfit.measuring.trace import Profiling
from trainfit.runtime import compile_blocks

pytestmark = pytest.mark.gpu
LENGTHS = (500,) * 16
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 99}


def step(*, offload: bool, compiled: bool, checkpointing: Any) -> tuple[list[Tensor], int, int]:
    """Loss and gradients of a step, its peak beyond the weights, and bytes copied out."""
    torch.manual_seed(0)
    settings = ClassifierSettings(
        name="bert-base", overrides=SIZES, checkpointing=checkpointing, attention_dropout=0.0
    )
    model = build_classifier(settings).cuda()
    if compiled:
        compile_blocks(model)
    batch = packed(LENGTHS, device="cuda") | {"labels": torch.arange(16, device="cuda") % 2}

    def take() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        return accumulate(
            model,
            loss,
            [batch],
            16.0,
            device_type="cuda",
            precision="bf16",
            saved=SavedOnHost if offload else None,
        )

    take()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total = take()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    found = [total, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    profiling = Profiling()
    take()
    seen = gather(profiling.end(), step=0)
    return found, peak, seen.offloaded_bytes


@pytest.mark.parametrize(
    ("compiled", "checkpointing"), [(False, "none"), (True, "none"), (False, "full")]
)
def test_the_same_numbers_in_less_memory(compiled: bool, checkpointing: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, more, none = step(offload=False, compiled=compiled, checkpointing=checkpointing)
        torch.compiler.reset()
        found, less, copied = step(offload=True, compiled=compiled, checkpointing=checkpointing)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.compiler.reset()
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-4)
    assert torch.equal(found[0], plain[0])
    assert none == 0
    assert copied > 10 << 20
    if checkpointing == "none":  # the inputs of four blocks may all be on their way
        assert less < more


def test_nothing_waits_for_the_gpu() -> None:
    saved = SavedOnHost()
    first = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    with saved.saving():  # the first copies take pinned memory, which waits
        first.sin().sin().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SavedOnHost().saving():
            total = first.sin().sin().sum()
        total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
