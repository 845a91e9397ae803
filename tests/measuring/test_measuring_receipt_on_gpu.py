"""The same on a GPU, where kernels tell."""

from __future__ import annotations

import pytest
import torch
from receipt_steps import Model, evidence, items, train
from torch.nn import functional

from trainfit.core.plan_records import RuntimeSettings
from trainfit.measuring.timing import time_work
from trainfit.runtime import applied, compile_blocks

pytestmark = pytest.mark.gpu


def parts(**options):
    model = Model(**options).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("on", [True, False])
def test_autocast_that_is_off_is_noticed(on: bool):
    model, optimizer = parts()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16, enabled=on):
            loss = model(torch.randn(64, 16, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = items(evidence(step), mixed_precision="fp16")["mixed_precision"]
    assert found.status == ("active" if on else "not_active")
    if not on:
        assert "autocast was off" in found.evidence


@pytest.mark.parametrize("masked", [True, False])
def test_a_mask_disables_flash_attention_and_is_named(masked: bool):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no flash kernel below 8.0")

    def step() -> None:
        q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        mask = torch.ones(128, 128, device="cuda", dtype=torch.bool) if masked else None
        functional.scaled_dot_product_attention(q, q, q, mask).sum().backward()

    with applied(RuntimeSettings(attention="flash")):
        found = items(evidence(step), flash_attention=True)["flash_attention"]
    if masked:
        assert found.status == "not_active"
        assert "a mask was passed" in found.evidence
    else:
        assert found.status == "active"


@pytest.mark.parametrize("pinned", [True, False])
def test_unpinned_batches_are_noticed(pinned: bool):
    batch = {"x": torch.randn(4096, 256, pin_memory=pinned)}
    seen = evidence(lambda: batch["x"].to("cuda", non_blocking=True), [batch])
    found = items(seen, pinned_memory=True)["pinned_memory"]
    assert found.status == ("active" if pinned else "not_active")
    if seen.batches.pinned_bytes or seen.batches.pageable_bytes:
        assert (seen.batches.pinned_bytes > seen.batches.pageable_bytes) == pinned


@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_seen_in_the_kernels(on: bool):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 below 8.0")
    a = torch.randn(1024, 1024, device="cuda")
    with applied(RuntimeSettings(tf32=on)):
        seen = evidence(lambda: a @ a)
    assert seen.products.kernels
    assert items(seen, tf32=True)["tf32"].status == ("active" if on else "not_active")


def test_recomputation_is_seen_from_another_thread():
    from torch.utils.checkpoint import checkpoint

    model, optimizer = parts()

    def step() -> None:
        x = torch.randn(8, 16, device="cuda", requires_grad=True)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = items(evidence(step), gradient_checkpointing="full", fused_optimizer=True)
    assert found["gradient_checkpointing"].status == "active"
    assert found["fused_optimizer"].status == "active"


def test_cuda_graphs_are_seen_to_be_launched():
    model, optimizer = parts()
    compile_blocks(model, "reduce-overhead")
    seen = evidence(lambda: train(model, optimizer, device="cuda"), warm_up=5)
    found = items(seen, compile=True, cuda_graphs=True)
    assert found["compile"].status == "active"
    assert found["cuda_graphs"].status == "active"


def test_times_are_those_of_the_device():
    a = torch.randn(4096, 4096, device="cuda")
    found = time_work(lambda: a @ a, repeats=5)
    assert found.median.value > 2 * 4096**3 / 2000e12  # no GPU does 2,000 TFLOP/s in fp32
    assert found.peak_reserved_gib >= found.peak_allocated_gib > 0
