"""Compiled blocks on fakes against what the compiler's own partitioner and arithmetic say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planning_models import write_bert

from trainfit.core.plan_records import TaskSpec
from trainfit.planning.estimator.estimate import Answer, Request, Target, ask

ENCODER = "trainfit.jobs.probes:encoder_step"
WIDTH, LAYERS, ROWS, LENGTH = 256, 4, 8, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("model")
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return write_bert(place, layers=LAYERS, width=WIDTH, **no_dropout)


def asked(folder: str, **more: Any) -> Answer:
    arguments = {
        "name": folder,
        "weights": "random",
        "classes": 2,
        "method": "full",
        "precision": "bf16",
        "checkpointing": "none",
        "rows": ROWS,
        "width": LENGTH,
        "slots": None,
        "lengths": None,
        "micro_batches": 1,
    }
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)
    task = TaskSpec(factory=ENCODER, arguments=arguments | more)
    (answer,) = ask([Request(task=task, targets=(hopper,))])
    assert answer.error is None
    return answer


def copies(answer: Answer) -> tuple[int, int]:
    """Kernels that only move data, and the bytes that they move."""
    moved = [d for d in answer.done if d.work.kind in ("copy", "slow") and not d.work.update]
    return sum(d.times for d in moved), sum(d.times * d.work.nbytes for d in moved)


def products(answer: Answer) -> int:
    return sum(d.times * d.work.flops for d in answer.done if d.work.kind == "product")


def test_compiling_fuses_what_only_moves_data_and_keeps_every_product(folder: str):
    eager, compiled = asked(folder), asked(folder, compile=True)
    assert products(compiled) == products(eager)
    (kernels, moved), (fused_kernels, fused_moved) = copies(eager), copies(compiled)
    assert fused_kernels <= kernels
    assert fused_moved < 0.95 * moved
    assert compiled.weights == eager.weights
    assert compiled.gradients == eager.gradients
    assert compiled.rooms[0].peak_allocated < eager.rooms[0].peak_allocated


def test_a_compiled_block_keeps_at_least_what_its_products_need(folder: str):
    """Inputs of four products of `WIDTH` and one of four times that, in half precision."""
    few, many = asked(folder, compile=True, rows=ROWS), asked(folder, compile=True, rows=4 * ROWS)
    grown = many.rooms[0].peak_allocated - few.rooms[0].peak_allocated
    tokens = 3 * ROWS * LENGTH
    least = tokens * LAYERS * 2 * (2 * WIDTH + 3 * WIDTH + 2 * 4 * WIDTH)
    assert least < grown < 2.5 * least


@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.soak), "full"])
def test_compiled_and_checkpointed_blocks_keep_less(folder: str, mode: str):
    kept = asked(folder, compile=True, rows=64)
    less = asked(folder, compile=True, rows=64, checkpointing=mode)
    assert less.rooms[0].peak_allocated < kept.rooms[0].peak_allocated
    assert products(less) > products(kept)


@pytest.mark.soak
def test_the_answer_does_not_depend_on_what_was_asked_before(folder: str):
    """Each has its own trace; what an earlier one left behind would show."""
    answers = [asked(folder, compile=True, depth=depth) for depth in (2, 3, 2)]
    first, _, again = (one.rooms[0] for one in answers)
    assert first.peak_allocated == again.peak_allocated
    assert first.activations == again.activations


@pytest.mark.soak
def test_a_gpt_can_be_compiled_too():
    arguments = {
        "name": "gpt-tiny",
        "precision": "bf16",
        "checkpointing": "none",
        "rows": 4,
        "width": 128,
        "micro_batches": 1,
    }
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)
    requests = [
        Request(
            task=TaskSpec(
                factory="trainfit.jobs.probes:gpt_step", arguments=arguments | {"compile": on}
            ),
            targets=(hopper,),
        )
        for on in (False, True)
    ]
    eager, compiled = ask(requests)
    assert (eager.error, compiled.error) == (None, None)
    assert products(compiled) == products(eager)


@pytest.mark.soak
def test_a_process_that_asks_is_not_changed_by_it(folder: str):
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from test_planning_estimator_compiled import asked; asked(sys.argv[2], compile=True);"
        "assert 'trainfit.planning.estimator.compiled_steps' not in sys.modules;"
        "assert torch.fx.GraphModule.__deepcopy__.__module__ == 'torch.fx.graph_module'"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_a_gpt_that_is_compiled_whole_keeps_what_its_checkpoints_keep():
    """Against an H200; both are asked of one process, where each has a graph of its own."""
    record = Path(__file__).parents[2] / "benchmarks/results/2026-11-15-tune-h200.json"
    work = json.loads(record.read_text())["workloads"]["gpt"]
    point = {"compile": "default", "micro_batches": 1, "way": "selective"}
    [selective] = [one for one in work["grid"] if one["point"] == point]
    [full] = [one for one in work["ladder"]["steps"] if one["name"] == "gradient checkpointing"]
    arguments = {
        "name": "gpt-124m",
        "rows": 64,
        "width": 1024,
        "micro_batches": 1,
        "precision": "bf16",
        "optimizer": "adamw_fused",
        "loss_chunk": 16384,
        "half_stream": True,
        "compile": True,
    }
    hopper = Target(sm_count=132, compute_capability="9.0", capacity=1 << 40)
    requests = [
        Request(
            task=TaskSpec(
                factory="trainfit.jobs.probes:gpt_step",
                arguments=arguments | {"checkpointing": mode},
            ),
            targets=(hopper,),
        )
        for mode in ("selective", "full")
    ]
    for answer, measured in zip(ask(requests), (selective, full), strict=True):
        assert answer.error is None
        predicted = answer.rooms[0].peak_allocated / 2**30
        assert predicted == pytest.approx(measured["peak_memory_gib"], rel=0.015)


def test_a_budget_for_activations_trades_memory_for_work(folder: str):
    """As the partitioner of a real run decides: fewer activations, some products twice."""
    whole, half, none = (
        asked(folder, compile=True, activation_budget=share) for share in (1.0, 0.5, 0.0)
    )
    peaks = [found.rooms[0].peak_allocated for found in (whole, half, none)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < peaks[0]
    assert products(none) > products(whole)


@pytest.mark.soak
def test_a_budget_keeps_the_bytes_that_torch_compile_keeps(folder: str):
    """Of real blocks on this CPU, compiled up to the partition that a GPU's run has too.

    By what further blocks add: what one block computes again is there once, in its backward pass.
    """
    torch.set_num_threads(1)
    for share in (1.0, 0.6, 0.4):
        more: dict[str, Any] = {"compile": True, "precision": "fp32", "activation_budget": share}
        few, many = (asked(folder, **more, depth=depth).rooms[0] for depth in (2, LAYERS))
        kept = kept_bytes(folder, share, LAYERS) - kept_bytes(folder, share, 2)
        told = many.activations - few.activations
        assert 0.98 * kept < told < 1.15 * kept, (share, kept, told)


def kept_bytes(folder: str, share: float, depth: int) -> int:
    """Bytes beside the weights that the forward pass of a real step leaves for the backward one."""
    # Not above: another test asks that this module imports nothing of the estimator's child.
    from trainfit.jobs.probes import encoder_step, loss, padded
    from trainfit.runtime import compile_blocks

    torch.compiler.reset()
    shape: dict[str, Any] = {"rows": ROWS, "width": LENGTH, "slots": None, "lengths": None}
    how: dict[str, Any] = {"method": "full", "precision": "fp32", "micro_batches": 1}
    model, _ = encoder_step(name=folder, weights="random", depth=depth, **how, **shape)
    compile_blocks(model, backend="aot_eager_decomp_partition", budget=share)
    weights = {weight.data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        summed = loss(model, padded(ROWS, LENGTH))
    del summed
    return sum(saved.values())
