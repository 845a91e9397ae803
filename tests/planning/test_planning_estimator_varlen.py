"""Variable-length attention on fake tensors: its memory against what was measured on an H200.

Measured with torch 2.11 on packed rows of bf16 steps (forward, backward, clip, AdamW), attention
dropout 0, the second step's peak.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # makes the operation known

from trainfit.core.plan_records import MemoryEstimate, TaskSpec
from trainfit.hardware.catalogue import find
from trainfit.planning.estimator.estimate import estimate_all
from trainfit.planning.estimator.kernel_buffers import Device, temporary_bytes

# tokens, heads, heads of keys, size of a head, sequences; bytes that the backward pass takes
TEMPORARY = [
    (16384, 12, 12, 64, 33, 64_296_960),
    (16384, 12, 12, 64, 128, 102_236_160),
    (4096, 4, 1, 256, 9, 38_356_992),
    (4096, 8, 2, 96, 9, 29_528_064),
]
# settings, tokens, sequences of a length, the longest; peak allocated and reserved
STEPS: list[tuple[dict[str, Any], int, tuple[int, int], int, int, int]] = [
    ({"name": "bert-base"}, 16384, (128, 100), 128, 8226680320, 8778678272),
    ({"name": "modernbert-base"}, 16384, (32, 500), 512, 12269913600, 12878610432),
    ({"name": "gemma-3-1b-it"}, 4096, (8, 500), 512, 26475998208, 28548530176),
]


@pytest.mark.parametrize(("tokens", "heads", "groups", "head", "sequences", "taken"), TEMPORARY)
def test_what_the_backward_pass_takes_while_it_runs(
    tokens: int, heads: int, groups: int, head: int, sequences: int, taken: int
) -> None:
    query = torch.empty(tokens, heads, head, dtype=torch.bfloat16, device="meta")
    key = torch.empty(tokens, groups, head, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    args = (query, query, key, key, query, query, starts, starts)
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    predicted = temporary_bytes(backward, args, Device(132, "9.0"))
    assert predicted == pytest.approx(taken, rel=0.025)  # blocks are rounded


# dtype, size of a head, longest; bytes that 40 sequences of 100 tokens with 6 heads take
EFFICIENT = [
    (torch.float16, 64, 128, 7_968_256),
    (torch.float16, 64, 500, 31_584_256),
    (torch.float16, 128, 128, 15_828_992),
    (torch.float16, 128, 500, 63_026_176),
    (torch.float16, 256, 128, 63_026_176),
    (torch.float16, 256, 500, 157_444_096),
    (torch.float32, 64, 128, 7_968_256),
    (torch.float32, 128, 500, 63_041_536),
    (torch.float32, 256, 128, 31_568_896),
    (torch.float32, 256, 500, 125_986_816),
]


@pytest.mark.parametrize(("dtype", "head", "longest", "taken"), EFFICIENT)
def test_what_the_memory_efficient_backward_pass_takes(
    dtype: torch.dtype, head: int, longest: int, taken: int
) -> None:
    query = torch.empty(4000, 6, head, dtype=dtype, device="meta")
    starts = torch.empty(41, dtype=torch.int32, device="meta")
    args = (query, query, query, query, starts, query, query, longest, 0.1, 0, False)
    backward = torch.ops.trainfit.efficient_attention_backward.default
    predicted = temporary_bytes(backward, args, Device(132, "9.0"))
    assert predicted == pytest.approx(taken, abs=1024)  # blocks are rounded
    forward = torch.ops.trainfit.efficient_attention.default
    extra = temporary_bytes(forward, (query, query, query, starts), Device(132, "9.0"))
    assert extra == (4 * query.numel() if head == 256 and dtype == torch.float16 else 0)


def packed_step(tokens: int, lengths: list[int], longest: int, **settings: Any) -> tuple[Any, Any]:
    from trainfit.jobs.models.classifier import build_classifier, classification_loss
    from trainfit.jobs.models.classifier_settings import ClassifierSettings

    model = build_classifier(ClassifierSettings(**settings))

    def make_step(built: torch.nn.Module) -> Any:
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        ids = torch.full((1, tokens), 5)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        labels = torch.zeros(len(lengths), dtype=torch.long)

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = built(input_ids=ids, cu_seqlens=starts, max_seqlen=longest)
            (classification_loss(logits, labels) / len(lengths)).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return model, make_step


def spec(settings: dict[str, Any], tokens: int, count: int, length: int, longest: int) -> TaskSpec:
    packed = {"tokens": tokens, "lengths": [length] * count, "longest": longest}
    fixed = {"attention_dropout": 0.0}
    return TaskSpec(
        factory=f"{Path(__file__).stem}:packed_step", arguments=fixed | settings | packed
    )


@pytest.fixture(scope="module")
def estimates() -> dict[str, list[MemoryEstimate]]:
    """All of them from one child process."""
    small = {"name": "bert-base", "overrides": {"num_hidden_layers": 2}}
    kinds = [{"attention": "varlen"}, {"attention": "masked"}]
    kinds.append({"attention": "varlen", "attention_dropout": 0.1})
    kinds.append({"attention": "varlen_efficient"})
    paths = [spec(small | kind, 4096, 32, 128, 128) for kind in kinds]
    found = estimate_all([*measured(STEPS[:1]), *paths], find("h200"))
    return {"measured": found[:1], "paths": found[1:]}


def measured(rows: list[Any]) -> list[TaskSpec]:
    return [
        spec(settings | {"attention": "varlen"}, tokens, *sequences, longest)
        for settings, tokens, sequences, longest, _, _ in rows
    ]


@pytest.mark.soak
def test_a_whole_step_against_the_gpu(estimates: dict[str, list[MemoryEstimate]]) -> None:
    compare(STEPS[:1], estimates["measured"])


@pytest.mark.soak
def test_larger_steps_against_the_gpu() -> None:
    compare(STEPS[1:], estimate_all(measured(STEPS[1:]), find("h200")))


def compare(rows: list[Any], found: list[MemoryEstimate]) -> None:
    for row, predicted in zip(rows, found, strict=True):
        allocated, reserved = row[-2:]
        assert predicted.peak_allocated_gib * 2**30 == pytest.approx(allocated, rel=0.01), row
        assert predicted.peak_reserved_gib * 2**30 == pytest.approx(reserved, rel=0.03), row


@pytest.mark.soak
def test_a_mask_takes_more(estimates: dict[str, list[MemoryEstimate]]) -> None:
    without, masked, *_ = estimates["paths"]
    square = 4096**2 * 3 / 2**30  # who sees whom, and the same in bf16 for the kernel
    assert masked.peak_allocated_gib - without.peak_allocated_gib > square / 2


@pytest.mark.soak
def test_dropout_takes_no_more(estimates: dict[str, list[MemoryEstimate]]) -> None:
    without, _, dropped, _ = estimates["paths"]
    assert dropped.peak_allocated_gib == pytest.approx(without.peak_allocated_gib, rel=0.001)


@pytest.mark.soak
def test_the_memory_efficient_kernel_saves_a_number_per_row(
    estimates: dict[str, list[MemoryEstimate]],
) -> None:
    """As the flash kernel does: 32 sequences of 128 tokens fill their rows of 128."""
    flash, masked, _, efficient = estimates["paths"]
    assert efficient.peak_allocated_gib == pytest.approx(flash.peak_allocated_gib, rel=0.05)
    assert efficient.peak_allocated_gib < masked.peak_allocated_gib


@pytest.fixture(scope="module")
def waiting() -> list[MemoryEstimate]:
    """Steps of BERT with 4 blocks: activations on the GPU and on the host, eager and compiled."""
    arguments = {
        "name": "bert-base",
        "overrides": {"num_hidden_layers": 4},
        "rows": 32,
        "width": 256,
        "slots": None,
        "lengths": None,
        "micro_batches": 1,
        "precision": "bf16",
        "attention": "masked",
    }
    ways = [{}, {"offload_activations": True}, {"compile": True}]
    ways.append({"compile": True, "offload_activations": True})
    specs = [
        TaskSpec(factory="trainfit.jobs.probes:encoder_step", arguments=arguments | way)
        for way in ways
    ]
    return estimate_all(specs, find("h200"))


def test_activations_on_the_host_take_no_memory_of_the_gpu(waiting: list[MemoryEstimate]) -> None:
    """But what is on its way at a time, at most 256 MiB, and tensors below a MiB."""
    eager, less, compiled, least = (one.peak_allocated_gib for one in waiting)
    blocks = 4 * 32 * 256 * 768 * 2 * 10 / 2**30  # ten tensors of a block's width in bf16, at least
    assert eager - less > blocks - 0.5
    assert less < 0.75 * eager
    assert least < 0.85 * compiled
