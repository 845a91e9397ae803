"""Every knob of the tuning guide, and what can be seen of it in a run.

Each test sets a knob by the guide's own name and looks at a counter, a dtype, a shape, a process or
a file, never at the parsed value.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from gpt_tiny import be_quick, gpt_words, plan_here, rows_of
from job_tiny import detect_once
from trainfit.conf import compose
from trainfit.core.records import HardwareProfile
from trainfit.data.token_files import open_tokens
from trainfit.engine import evaluation, setup, step
from trainfit.engine.observers import Observer
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import gpt as job
from trainfit.jobs import job_plan
from trainfit.jobs.models.gpt_model import Gpt
from trainfit.jobs.pretraining import GptResult
from trainfit.jobs.run import Show
from trainfit.planning import planner
from trainfit.runtime import compile_model


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def go(tmp: Path, *more: str, watch: Observer | None = None) -> GptResult:
    show = Show(watch=lambda _: () if watch is None else (watch,))
    return job.train(compose("gpt", gpt_words(tmp, *more)), show)


class Seen(Observer):
    """Calls a function after every step and keeps what it says."""

    def __init__(self, look: Any) -> None:
        self.look, self.found = look, []

    def on_step(self, step: int) -> None:
        self.found.append(self.look())


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, tuple[int, ...]]]:
    """Whether it trains, and the shape, of every batch that a model sees."""
    seen: list[tuple[bool, tuple[int, ...]]] = []
    encode = Gpt.encode

    def look(self: Gpt, input_ids: torch.Tensor) -> torch.Tensor:
        seen.append((self.training, tuple(input_ids.shape)))
        return encode(self, input_ids)

    monkeypatch.setattr(Gpt, "encode", look)
    return seen


def machine(slug: str) -> HardwareProfile:
    return as_if(find(slug))


# ── enable_tf32, enable_amp, amp_dtype ────────────────────────────────────────────────────────


def planned_on(slug: str, tmp: Path, *more: str) -> Any:
    composed = compose("gpt", gpt_words(tmp, *more))
    return plan_here(job_plan.question(composed), machine(slug))


@pytest.mark.parametrize(
    ("slug", "words", "on"),
    [
        ("a30", ["enable_tf32=true"], True),
        ("a30", ["enable_tf32=false"], False),
        ("a30", [], True),
        ("t4", ["enable_tf32=true"], False),  # there is none to turn on
    ],
)
def test_enable_tf32(slug: str, words: list[str], on: bool, tmp_path: Path, monkeypatch: Any):
    wanted = planned_on(slug, tmp_path, *words).runtime
    monkeypatch.setattr(
        planner, "plan", lambda q, p, **more: replace(plan_here(q, p, **more), runtime=wanted)
    )
    backends: Any = torch.backends
    flags = Seen(lambda: (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision))
    go(tmp_path, watch=flags)
    assert set(flags.found) == {("tf32", "tf32") if on else ("ieee", "ieee")}


@pytest.mark.parametrize(
    ("slug", "words", "dtype"),
    [
        ("a30", ["enable_amp=true", "amp_dtype=bf16"], "bf16"),
        ("a30", ["enable_amp=true", "amp_dtype=fp16"], "fp16"),
        ("a30", ["enable_amp=true"], "bf16"),
        ("t4", ["enable_amp=true", "amp_dtype=bf16"], "fp16"),  # bf16 unsupported
        ("t4", ["enable_amp=true"], "fp16"),
        ("a30", ["enable_amp=false"], "fp32"),
        ("t4", ["enable_amp=false", "amp_dtype=bf16"], "fp32"),
    ],
)
def test_enable_amp_and_amp_dtype(
    slug: str, words: list[str], dtype: Any, tmp_path: Path, monkeypatch: Any
):
    found = planned_on(slug, tmp_path, *words).precision
    monkeypatch.setattr(
        planner, "plan", lambda q, p, **more: replace(plan_here(q, p, **more), precision=found)
    )
    entered: list[Any] = []

    def autocast(kind: str, precision: Any) -> Any:
        entered.append(precision)  # a half-precision product would be slow or worse on a CPU
        return nullcontext()

    monkeypatch.setattr(step, "autocast", autocast)
    monkeypatch.setattr(evaluation, "autocast", autocast)
    done = go(tmp_path)
    assert len(entered) == 6 + 2  # in training and in evaluation alike
    assert set(entered) == {dtype}
    [state, *_] = sorted((Path(done.run) / "checkpoints").glob("*/state.json"))
    scaled = json.loads(state.read_text())["scale"] is not None
    assert scaled == (dtype == "fp16")  # fp16 alone needs it


def test_autocast_takes_the_dtype_that_it_is_told():
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with step.autocast("cpu", name):  # type: ignore[arg-type]
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is dtype
    with step.autocast("cpu", "fp32"):
        assert not torch.is_autocast_enabled("cpu")


# ── enable_compile ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("on", [True, False])
def test_enable_compile(on: bool, tmp_path: Path, monkeypatch: Any):
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(setup, "compile_model", partial(compile_model, backend="aot_eager"))
    done = go(tmp_path, f"enable_compile={str(on).lower()}")
    assert (counters["stats"]["unique_graphs"] > 0) == on
    rows = rows_of(Path(done.run), "train")
    assert (rows[0]["compile_seconds"] > 0) == on
    assert done.spent.compiling == pytest.approx(sum(row["compile_seconds"] for row in rows))
    assert rows[-1]["compile_seconds"] == 0
    torch.compiler.reset()


# ── max_length, batch_size ────────────────────────────────────────────────────────────────────


def test_max_length_is_the_block_size(tmp_path: Path, shapes: Any):
    done = go(tmp_path, "max_length=24")
    assert {shape[1] for _, shape in shapes} == {24}
    weights = load_file(next(Path(done.run).glob("checkpoints/*/model.safetensors")))
    assert weights["position_embedding.weight"].shape[0] == 24


def test_batch_size_is_what_goes_through_at_a_time(tmp_path: Path, shapes: Any):
    go(tmp_path, "batch_size=6")
    trained = [shape for training, shape in shapes if training]
    assert trained == [(6, 16)] * 6
    shapes.clear()
    go(tmp_path, "batch_size=2", "training.effective_batch_size=6")
    trained = [shape for training, shape in shapes if training]
    assert trained == [(2, 16)] * 18


def test_the_global_batch_is_the_batch_of_all_ranks(tmp_path: Path):
    question = job_plan.question(compose("gpt", gpt_words(tmp_path, "batch_size=6")))
    assert plan_here(question, detect_once(), ranks=4).effective_batch_size == 24


# ── eval_steps, logging_steps, eval_iters ─────────────────────────────────────────────────────


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 6]), (4, [4, 6]), (100, [6])])
def test_eval_steps(every: int, steps: list[int], tmp_path: Path):
    done = go(tmp_path, f"eval_steps={every}")
    found = [row["step"] for row in rows_of(Path(done.run), "evaluation")]
    assert found == steps  # and never at step 0
    saved = sorted(int(path.name.split("-")[1]) for path in Path(done.run).glob("checkpoints/*"))
    assert set(saved) <= set(steps)


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (50, [6])])
def test_logging_steps(every: int, steps: list[int], tmp_path: Path):
    done = go(tmp_path, f"logging_steps={every}")
    log = (Path(done.run) / "train.log").read_text().splitlines()
    assert [int(line.split("iter ")[1].split(":")[0]) for line in log if " iter " in line] == steps


@pytest.mark.parametrize("batches", [1, 3])
def test_eval_iters(batches: int, tmp_path: Path, shapes: Any):
    go(tmp_path, f"eval_iters={batches}", "training.eval_batch_size=5")
    looked = [shape for training, shape in shapes if not training]
    assert looked == [(5, 16)] * (2 * batches)  # evaluations at steps 3 and 6


def test_the_evaluated_blocks_are_the_same_whatever_the_memory(tmp_path: Path, shapes: Any):
    words = ("eval_iters=1", "training.eval_batch_size=auto", "effective_batch_size=8")
    losses = [
        go(tmp_path, *words, f"gradient_accumulation_steps={parts}").metrics["val_loss"]
        for parts in (1, 8)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    looked = [shape[0] for training, shape in shapes if not training]
    assert sum(looked) == 2 * 2 * 32


# ── dataloader_* ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 2])
def test_dataloader_num_workers(count: int, tmp_path: Path):
    watch = Seen(lambda: len(multiprocessing.active_children()))
    go(tmp_path, f"dataloader_num_workers={count}", watch=watch)
    assert max(watch.found) == count


@pytest.mark.parametrize("stay", [True, False])
def test_dataloader_persistent_workers(stay: bool, tmp_path: Path):
    watch = Seen(lambda: {child.pid for child in multiprocessing.active_children()})
    words = ["dataloader_num_workers=1", f"dataloader_persistent_workers={str(stay).lower()}"]
    go(tmp_path, *words, "max_length=128", "batch_size=24", watch=watch)
    in_epoch = (len(open_tokens(tmp_path / "tokens").train) - 1) // 128 // 24
    assert 1 <= in_epoch < 6
    pids = set().union(*watch.found)
    assert len(pids) == (1 if stay else math.ceil(6 / in_epoch))


@pytest.mark.parametrize("pin", [True, False])
def test_dataloader_pin_memory(pin: bool, tmp_path: Path, monkeypatch: Any):
    asked: list[Any] = []
    build = setup.StepLoader

    def look(task: Any, options: Any, device: torch.device, **more: Any) -> Any:
        # A loader for a GPU, which is built here and not run.
        asked.append(build(task, options, torch.device("cuda"), **more).workers().pin_memory)
        return build(task, options, device, **more)

    monkeypatch.setattr(setup, "StepLoader", look)
    go(tmp_path, f"dataloader_pin_memory={str(pin).lower()}")
    assert asked == [pin]


def test_prefetch_factor(tmp_path: Path, monkeypatch: Any):
    asked: list[Any] = []
    build = setup.StepLoader

    def look(*args: Any, **more: Any) -> Any:
        made = build(*args, **more)
        asked.append(made.workers().prefetch_factor)
        return made

    monkeypatch.setattr(setup, "StepLoader", look)
    go(tmp_path, "dataloader_num_workers=1", "dataloader_prefetch_factor=5")
    assert asked == [5]


# ── the allocator ─────────────────────────────────────────────────────────────────────────────


def test_expandable_segments(tmp_path: Path, monkeypatch: Any):
    from trainfit.runtime import environment

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(environment, "_has_cuda", lambda: True)  # a torch that would read it
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    watch = Seen(lambda: " ".join(os.environ.get(name, "") for name in names))
    go(tmp_path, "device.expandable_segments=true", watch=watch)
    assert "expandable_segments:True" in watch.found[0]
    watch = Seen(lambda: " ".join(os.environ.get(name, "") for name in names))
    go(tmp_path, watch=watch)
    assert "expandable_segments" not in watch.found[0]


# ── the optimizer's numbers and the schedule ──────────────────────────────────────────────────


def test_warm_up_then_cosine_to_a_tenth(tmp_path: Path):
    done = go(tmp_path, "logging_steps=1", "training.max_steps=40", "training.warmup_steps=4")
    rates = [row["learning_rate"] for row in rows_of(Path(done.run), "train")]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.001, rel=0.1)
    higher = go(tmp_path, "training.min_learning_rate_ratio=0.5", "logging_steps=1")
    assert rows_of(Path(higher.run), "train")[-1]["learning_rate"] > 0.005


@contextmanager
def groups_of(monkeypatch: Any) -> Any:
    seen: list[dict[str, Any]] = []
    build = setup.build_optimizer

    def look(*args: Any) -> Any:
        made = build(*args)
        seen.extend(made.param_groups)
        return made

    monkeypatch.setattr(setup, "build_optimizer", look)
    yield seen


def test_betas_decay_and_the_kind_of_optimizer(tmp_path: Path, monkeypatch: Any):
    with groups_of(monkeypatch) as seen:
        go(tmp_path)
        assert {group["betas"] for group in seen} == {(0.9, 0.95)}
        assert [group["weight_decay"] for group in seen] == [0.1, 0.0]  # norms do not decay
        assert all(group["fused"] for group in seen)
        seen.clear()
        go(tmp_path, "training.beta1=0.8", "training.beta2=0.9", "optimization.optimizer=adamw")
        assert {group["betas"] for group in seen} == {(0.8, 0.9)}
        assert not any(group["fused"] for group in seen)


def test_max_grad_norm_bounds_the_update(tmp_path: Path):
    def moved(*more: str) -> float:
        done = go(tmp_path, "training.max_steps=1", *more)
        folder = next(Path(done.run).glob("checkpoints/*"))
        state = load_file(folder / "optimizer.safetensors")
        squares = [float(t.square().sum()) for n, t in state.items() if n.endswith("exp_avg")]
        return sum(squares) ** 0.5 / (1 - 0.9)  # the first mean is a tenth of the gradient

    assert moved("training.max_grad_norm=0.01") == pytest.approx(0.01, rel=0.01)
    assert moved("training.max_grad_norm=null") > 0.1


def test_checkpointing_and_dropout_reach_the_model(tmp_path: Path, monkeypatch: Any):
    models: list[Gpt] = []
    init = Gpt.__init__

    def look(self: Gpt, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        models.append(self)

    monkeypatch.setattr(Gpt, "__init__", look)
    go(tmp_path, "model.dropout=0.2", "model.use_gradient_checkpointing=true")
    assert models[0].dropout.p == 0.2
    assert models[0].checkpointing == "full"


# ── on a GPU ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_run_in_the_dtype_on_a_gpu(amp: str, dtype: Any, tmp_path: Path, monkeypatch: Any):
    from trainfit.jobs.models.gpt_model import CausalAttention

    seen: set[torch.dtype] = set()
    forward = CausalAttention.forward

    def look(self: CausalAttention, hidden: torch.Tensor) -> torch.Tensor:
        out = forward(self, hidden)
        seen.add(out.dtype)
        return out

    monkeypatch.setattr(CausalAttention, "forward", look)
    go(tmp_path, "enable_amp=true", f"amp_dtype={amp}")
    assert seen == {dtype}


@pytest.mark.gpu
def test_a_run_on_a_known_gpu_has_an_mfu_and_pins_its_batches(tmp_path: Path, monkeypatch: Any):
    from trainfit.engine import recovery

    pinned: list[bool] = []
    copy = recovery.to_device

    def look(batches: Any, device: Any) -> Any:
        pinned.extend(batch["input_ids"].is_pinned() for batch in batches)
        return copy(batches, device)

    monkeypatch.setattr(recovery, "to_device", look)
    done = go(tmp_path, "dataloader_pin_memory=true")
    assert all(pinned)
    assert done.mfu is None or 0 < done.mfu < 1


@pytest.mark.gpu
def test_the_cache_is_freed_after_an_evaluation(tmp_path: Path):
    unused: list[int] = []

    class Watch(Observer):
        def on_evaluation(self, step: int, metrics: Any) -> None:
            unused.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by others: CUDA graphs
    go(tmp_path, "training.eval_batch_size=512", watch=Watch())
    assert unused
    assert max(unused) - before < 64 << 20
