"""torch's memory-efficient kernel on packed rows, against the masked reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_tiny import logits_and_gradients, packed, padded, relative_error, tiny
from torch import Tensor

from trainfit.kernels import attention
from trainfit.kernels.attention import Layout, lay_out, masked_attention
from trainfit.kernels.efficient_packed import efficient_attention, efficient_attention_backward
from trainfit.kernels.varlen import varlen_attention
from trainfit.planning.estimator.kernel_buffers import Device, temporary_bytes
from trainfit.runtime import compile_blocks

pytestmark = pytest.mark.gpu
LENGTHS = (50, 200, 1, 130, 77, 160)
WINDOWS = [(None, False), (200, False), (None, True), (17, True)]
ERRORS = {torch.float32: 1e-4, torch.float16: 3e-3}


def rows_with_filler() -> Layout:
    """Sequences of 50, 0, 200, 1 and 0 tokens, and filler."""
    starts = torch.tensor([0, 50, 50, 250, 251, 251], dtype=torch.int32, device="cuda")
    ids = torch.zeros(1, 700, dtype=torch.long, device="cuda")
    return lay_out(ids, cu_seqlens=starts, max_seqlen=200)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("head", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize(
    ("window", "causal"), [(None, False), (200, False), (None, True), (17, True)]
)
def test_the_kernel_is_the_masked_reference(
    heads: tuple[int, int], head: int, dtype: torch.dtype, window: int | None, causal: bool
) -> None:
    layout = rows_with_filler()
    torch.manual_seed(0)
    parts = [
        torch.randn(1, count, 700, head, device="cuda", dtype=dtype)
        for count in (heads[0], heads[1], heads[1])
    ]
    weights = torch.randn(1, 251, heads[0], head, device="cuda")
    call: dict[str, Any] = {"scaling": head**-0.5, "dropout": 0.0, "softcap": None}
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    results = []
    for made, kind in (
        (masked_attention(layout, window, causal=causal), torch.float64),
        (
            varlen_attention(layout, window, dtype, causal=causal, kernel="varlen_efficient"),
            dtype,
        ),
    ):
        inputs = [part.to(kind).requires_grad_() for part in parts]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = made(module, *inputs, windowed=True, **call)
        assert out.isfinite().all()
        found = torch.autograd.grad((out[:, :251].float() * weights).sum(), inputs)
        results.append([out[:, :251], *found])
    for sure, quick in zip(*results, strict=True):
        assert relative_error(quick, sure) <= ERRORS[dtype]
    assert all((gradient[:, :, 251:] == 0).all() for gradient in results[1][1:])


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_a_model_in_it_is_as_near_to_float64_as_on_padded_rows(
    precision: torch.dtype | None,
) -> None:
    batch = packed(LENGTHS, filler=300, device="cuda")

    def found(path: attention.Path, rows: dict[str, Any]) -> Tensor:
        model = tiny("bert-base", attention=path).cuda()
        with torch.autocast("cuda", precision, enabled=precision is not None):
            logits, gradients = logits_and_gradients(model, rows)
        return torch.cat([logits.flatten(), *(g.flatten() for g in gradients.values())])

    exact = tiny("bert-base", attention="masked").cuda().double()
    logits, gradients = logits_and_gradients(exact, padded(batch))
    sure = torch.cat([logits.flatten(), *(g.flatten() for g in gradients.values())])
    quick = relative_error(found("varlen_efficient", batch), sure)
    plain = relative_error(found("auto", padded(batch)), sure)
    assert quick <= 2 * plain + 1e-5


def inputs() -> tuple[list[Tensor], dict[str, Any]]:
    batch = packed(LENGTHS, filler=44, device="cuda")
    shape = (1, 4, batch["input_ids"].shape[1], 64)
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3)], batch


def attended(parts: list[Tensor], batch: dict[str, Any]) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        made = attention.choose(
            lay_out(**batch), None, path="varlen_efficient", dtype=torch.float32, head=64
        )
        return made(
            torch.nn.Module(), *parts, scaling=None, dropout=0.0, windowed=False, softcap=None
        )


def test_nothing_waits_for_the_gpu() -> None:
    parts, batch = inputs()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attended(parts, batch).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert parts[0].grad is not None


def test_a_graph_replays_it_with_other_numbers_and_lengths() -> None:
    parts, batch = inputs()

    def step() -> tuple[Tensor, ...]:
        out = attended(parts, batch)
        return out, *torch.autograd.grad(out.float().square().sum(), parts)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for part in parts:
            part.mul_(-0.5)
        batch["cu_seqlens"].copy_(torch.tensor([0, 9, 9, 200, 390, 440, 618], dtype=torch.int32))
    graph.replay()
    for found, sure in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, sure, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_compute_the_same(checkpointing: str) -> None:
    batch = packed(LENGTHS, filler=44, device="cuda")

    def found(compiled: bool) -> Tensor:
        settings: Any = {"attention": "varlen_efficient", "checkpointing": checkpointing}
        model = tiny("bert-base", **settings).cuda()
        if compiled:
            compile_blocks(model)
        with torch.autocast("cuda", torch.float16):
            logits, gradients = logits_and_gradients(model, batch)
        return torch.cat([logits.flatten(), *(g.flatten() for g in gradients.values())])

    try:
        assert relative_error(found(True), found(False)) < 0.01
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("longest", [128, 500])
def test_its_memory_is_what_the_estimator_counts(
    dtype: torch.dtype, head: int, longest: int
) -> None:
    count, heads = 40, 6
    starts = torch.arange(0, count * 100 + 1, 100, dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(count * 100, heads, head, device="cuda", dtype=dtype) for _ in range(3)
    )
    properties = torch.cuda.get_device_properties("cuda")
    device = Device(properties.multi_processor_count, f"{properties.major}.{properties.minor}")
    numbers = (longest, 0.1, 0, False)
    forward = (query, key, value, starts, *numbers)
    taken, kept = measured(lambda: efficient_attention(*forward))
    counted = temporary_bytes(torch.ops.trainfit.efficient_attention.default, forward, device)
    assert taken == pytest.approx(counted, rel=0.05, abs=1 << 21)
    backward = (query, query, key, value, starts, *kept, *numbers)
    taken, _ = measured(lambda: efficient_attention_backward(*backward))
    operation = torch.ops.trainfit.efficient_attention_backward.default
    counted = temporary_bytes(operation, backward, device)
    assert taken == pytest.approx(counted, rel=0.1, abs=1 << 21)


def measured(call: Any) -> tuple[int, Any]:
    """Bytes in use at the peak beyond the results, and these."""
    call()  # the first call loads the kernel
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), found
