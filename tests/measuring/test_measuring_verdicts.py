"""Verdicts on evidence as a GPU gives it, and on runs with folds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from receipt_steps import items

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, RuntimeSettings, TaskSpec, Workload
from trainfit.core.records import Receipt
from trainfit.measuring.evidence import products_of
from trainfit.measuring.receipt import VERDICTS, make_receipt, read_receipt
from trainfit.measuring.trace import (
    AttentionSeen,
    BatchesSeen,
    CompilerSeen,
    Evidence,
    Kernel,
    ProductsSeen,
    SwitchesSeen,
    Trace,
    read,
)


def planned(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "fits": True,
        "task": TaskSpec(factory="my_images:step", arguments={}),
        "workload": Workload(
            lengths=(1,) * 8, max_length=1, sequences=8, epochs=1, effective_batch_size=4
        ),
        "gpu": None,
        "precision": "fp32",
        "runtime": RuntimeSettings(),
        "packed": False,
        "attention": "sdpa",
        "batch_size": 4,
        "micro_batch_tokens": 4,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": 4,
        "cuts": (1,),
        "gradient_checkpointing": "none",
        "compile": False,
        "compile_mode": "default",
        "optimizer": "adamw_fused",
        "num_workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "eval_batch_size": 4,
        "memory": None,
        "time": None,
    }
    return Plan(**(values | changes))


def seen(**changes: Any) -> Evidence:
    return Evidence(step=10, device="cuda", **changes)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (AttentionSeen(calls={"efficient": 12}, masked=True, dtype="bf16", head=64), "a mask"),
        (AttentionSeen(calls={"cudnn": 12}, masked=True, dtype="bf16", head=64), "a mask"),
        (AttentionSeen(calls={"efficient": 12}, dtype="fp32", head=64), "given fp32"),
        (AttentionSeen(calls={"math": 12}, dtype="bf16", head=320), "heads of 320"),
    ],
)
def test_what_keeps_the_flash_kernel_from_running_is_named(found: AttentionSeen, cause: str):
    item = items(seen(attention=found), flash_attention=True)["flash_attention"]
    assert item.status == "not_active"
    assert cause in item.evidence
    assert item.mend


def test_a_flash_kernel_that_is_switched_off_is_told_apart():
    evidence = seen(
        attention=AttentionSeen(calls={"math": 1}, dtype="bf16", head=64),
        switches=SwitchesSeen(flash=False),
    )
    item = items(evidence, flash_attention=True)["flash_attention"]
    assert "switch" in item.evidence


@pytest.mark.parametrize("kernel", ["flash", "varlen", "cudnn"])
def test_flash_kernels_count_as_flash(kernel: str):
    found = items(seen(attention=AttentionSeen(calls={kernel: 3})), flash_attention=True)
    assert found["flash_attention"].status == "active"


@pytest.mark.parametrize(
    ("asked", "given", "status"),
    [(0.1, 0.1, "active"), (0.1, 0.0, "not_active"), (0.0, 0.0, "off"), (None, 0.1, "active")],
)
def test_attention_dropout_is_what_the_kernel_was_given(asked: Any, given: float, status: str):
    found = AttentionSeen(calls={"varlen": 12}, dropout=given)
    item = items(seen(attention=found), attention_dropout=asked)["attention_dropout"]
    assert (item.status, item.observed) == (status, given)
    assert "varlen kernel" in item.evidence


@pytest.mark.parametrize("kernel", ["disentangled", "softcapped"])
def test_flash_is_no_question_where_the_model_needs_a_kernel_of_its_own(kernel: str):
    found = items(seen(attention=AttentionSeen(calls={kernel: 3})), attention=kernel)
    assert found["attention"].status == "active"
    assert found["flash_attention"].status == "not_applicable"


def test_tf32_is_judged_by_kernels_before_switches():
    exact = ProductsSeen(shares={"fp32": 1.0}, exact_kernels=9)
    evidence = seen(products=exact, switches=SwitchesSeen(tf32=True))
    item = items(evidence, tf32=True)["tf32"]
    assert item.status == "not_active"
    assert "9 exact" in item.evidence
    fast = ProductsSeen(shares={"fp32": 1.0}, tf32_kernels=9)
    evidence = seen(products=fast, switches=SwitchesSeen(tf32=False))
    assert items(evidence)["tf32"].status == "active"


def test_tiny_exact_products_of_a_head_are_no_evidence_against_tf32():
    mixed = ProductsSeen(shares={"bf16": 0.999, "fp32": 0.001}, exact_kernels=4)
    for on in (True, False):
        evidence = seen(products=mixed, switches=SwitchesSeen(tf32=on))
        assert items(evidence, tf32=True)["tf32"].status == ("active" if on else "not_active")


@pytest.mark.parametrize(
    ("kernel", "fast", "exact"),
    [
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", 0, 0),
        ("ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn", 0, 0),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1>", 0, 0),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 0, 0),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4>", 1, 0),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4", 1, 0),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3", 0, 1),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", 0, 1),
    ],
)
def test_tf32_is_told_from_half_precision_by_the_names_of_kernels(
    kernel: str, fast: int, exact: int
):
    found = products_of(Trace([], [Kernel(kernel, 1, 1e-3)]))
    assert (found.tf32_kernels, found.exact_kernels) == (fast, exact)
    assert found.kernels == (kernel,)


def test_unpinned_batches_are_noticed():
    batches = BatchesSeen(tensors=4, pinned=0, pageable_bytes=4096)
    item = items(seen(batches=batches), pinned_memory=True)["pinned_memory"]
    assert item.status == "not_active"
    assert "0 of 4 tensors" in item.evidence
    assert "4,096 from pageable" in item.evidence


def test_graphs_that_were_not_launched_are_noticed():
    item = items(seen(compiler=CompilerSeen(regions=4)), cuda_graphs=True)["cuda_graphs"]
    assert item.status == "not_active"


def test_cudnn_has_nothing_to_choose_without_a_convolution():
    on = seen(switches=SwitchesSeen(cudnn_benchmark=True))
    assert items(on, cudnn_benchmark=True)["cudnn_benchmark"].status == "not_applicable"
    off = seen(switches=SwitchesSeen(cudnn_benchmark=False), convolutions=2)
    assert items(off, cudnn_benchmark=True)["cudnn_benchmark"].status == "not_active"


def event(name: str, start: int, end: int, device: str = "CPU", **more: Any) -> Any:
    told: dict[str, Any] = {"start_thread_id": 1, "dtypes": [], "shapes": [], "metadata_json": ""}
    told |= {"correlation_id": 0, "linked_correlation_id": 0} | more
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        end_ns=lambda: end,
        device_type=lambda: SimpleNamespace(name=device),
        **{key: (lambda value=value: value) for key, value in told.items()},
    )


def test_copies_are_weighed_by_their_bytes():
    from trainfit.measuring.evidence import batches

    trace = read(
        [
            event("Memcpy HtoD (Pinned -> Device)", 0, 9, "CUDA", metadata_json='"bytes": 4096'),
            event("Memcpy HtoD (Pageable -> Device)", 0, 1, "CUDA", metadata_json='"bytes": 4'),
            event("Memcpy DtoH (Device -> Pinned)", 0, 1, "CUDA", metadata_json='"bytes": 8'),
        ]
    )
    found = batches([], trace, 1.0)
    assert (found.pinned_bytes, found.pageable_bytes) == (4096, 4)


def test_the_backward_pass_of_another_thread_is_told_apart():
    trace = read(
        [
            event("aten::linear", 0, 5, start_thread_id=1),
            event("autograd::engine::evaluate_function: X", 2, 9, start_thread_id=2),
            event("aten::linear", 3, 4, start_thread_id=2),
            event("aten::linear", 6, 7, start_thread_id=1),
        ]
    )
    assert [op.backward for op in trace.operators if op.name == "aten::linear"] == [
        False,
        True,
        False,
    ]


@given(st.dictionaries(st.sampled_from(list(VERDICTS)), st.none() | st.booleans()))
def test_nothing_that_was_not_asked_for_can_fail(wanted: dict[str, bool | None]):
    """And a mend is given where it is needed, and nowhere else."""
    evidence = seen(
        products=ProductsSeen(shares={"fp32": 1.0}),
        attention=AttentionSeen(calls={"math": 1}),
        updates={"single": 3},
    )
    for item in make_receipt("run", evidence, wanted).items:
        assert bool(item.mend) == (item.status == "not_active")
        if not wanted.get(item.name):
            assert item.status != "not_active"


def test_records_survive_their_file(tmp_path: Path):
    evidence = seen(
        products=ProductsSeen(shares={"bf16": 0.9}, kernels=("nvjet",)), updates={"fused": 2}
    )
    evidence.save(tmp_path / "evidence.json")
    assert Evidence.load(tmp_path / "evidence.json") == evidence


def test_what_failed_in_one_fold_has_failed(tmp_path: Path):
    good = seen(updates={"fused": 1})
    for number, evidence in enumerate([good, seen(updates={"single": 1}), good], 1):
        fold = tmp_path / f"fold-{number}"
        fold.mkdir()
        make_receipt("fold", evidence, {"fused_optimizer": True}).save(fold / "receipt.json")
    found = {item.name: item for item in read_receipt(tmp_path).items}
    assert found["fused_optimizer"].status == "not_active"
    assert found["fused_optimizer"].evidence.startswith("fold-2: ")
    assert len(found) == len(VERDICTS)


@pytest.mark.parametrize("folder", [".", "fold-1"])
def test_a_plan_is_held_against_any_run_that_has_evidence(folder: str, tmp_path: Path):
    """Whatever the task: the plan of the run says what was asked for."""
    planned(precision="bf16").save(tmp_path / "plan.json")
    (tmp_path / folder).mkdir(exist_ok=True)
    seen(products=ProductsSeen(shares={"fp32": 1.0})).save(tmp_path / folder / "evidence.json")
    found = {item.name: item for item in read_receipt(tmp_path).items}
    item = found["mixed_precision"]
    assert (item.requested, item.observed, item.status) == ("bf16", "off", "not_active")
    assert found["gradient_clipping"].requested is None


def test_a_run_that_nobody_looked_at_says_so(tmp_path: Path):
    with pytest.raises(BadInput, match="no receipt"):
        read_receipt(tmp_path)
    seen(updates={"single": 1}).save(tmp_path / "evidence.json")
    assert isinstance(read_receipt(tmp_path), Receipt)
