"""Plans by bounds: never below what was measured, never wasteful, and nothing is simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainfit.conf import compose
from trainfit.core.plan_records import Plan
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.hardware.model_shapes import model_shape, model_shapes, sizes_of
from trainfit.jobs import job_plan
from trainfit.jobs.tuned_plans import JobQuestion
from trainfit.packing import ladder
from trainfit.planning import bounds, planner
from trainfit.planning.bounds import _FAMILIES, Load, bound, count_weights
from trainfit.planning.estimator.estimate import estimate
from trainfit.reports.plan_page import plan_page

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
JOBS = ("2026-11-15-jobs-h200.json", "2026-11-15-capped-h200.json")
GPT = {"small": "gpt-124m", "medium": "gpt-medium"}


def recorded_steps() -> list[tuple[dict[str, Any], float, float]]:
    """Steps of trainfit's jobs on an H200: the probe's arguments, and both peaks in GiB."""
    found = []
    for name in JOBS:
        for row in json.loads((RESULTS / name).read_text())["results"]:
            if "error" not in row:
                peaks = row["peak_allocated"] / 2**30, row["peak_reserved"] / 2**30
                found.append((row["case"]["arguments"], *peaks))
    for run in json.loads((RESULTS / "2026-11-15-gpt-h200.json").read_text())["runs"]:
        for row in run["results"]:
            how = row.get("settings", {"kind": "other"})
            if how["kind"] == "trainfit" and "error" not in row and how["mode"] == "default":
                arguments = {
                    "name": GPT[row["shape"]],
                    "rows": row["batch"] // how.get("parts", 1),
                    "width": 1024,
                    "precision": how["precision"],
                    "optimizer": how["optimizer"],
                    "checkpointing": "none",
                    "loss_chunk": how["chunk"],
                }
                peak = row["peak_allocated_gib"]  # others' steps were reserved beside it
                found.append((arguments, peak, peak))
    return found


def bound_of(arguments: dict[str, Any], captured: bool = False) -> float:
    sizes = sizes_of(model_shape(arguments["name"]).config | {"max_position_embeddings": 1024})
    assert sizes is not None
    lengths = arguments.get("lengths")
    padded = arguments.get("slots") is None
    load = Load(
        tokens=arguments["rows"] * arguments["width"],
        longest=max(lengths) if lengths else arguments["width"],
        attention="own" if padded and sizes.family == "deberta-v2" else "varlen",
        evaluated=0,
        captured=captured,
    )
    taken = bound(sizes, arguments, arguments.get("method", "full"), load)
    return taken.peak_reserved / 2**30


def test_no_recorded_step_takes_more_than_its_bound_or_a_third_of_it() -> None:
    rows = recorded_steps()
    assert len(rows) > 50
    for arguments, allocated, reserved in rows:
        most = bound_of(arguments)
        assert allocated <= reserved <= most, arguments
        if arguments["checkpointing"] == "none":
            assert most <= 3 * allocated, arguments
        assert bound_of(arguments, captured=True) >= most


ENCODER = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}
GROUPED = {"num_key_value_heads": 4, "head_dim": 64}
FAMILIES = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), ENCODER),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ENCODER | GROUPED),
    "gemma2": ENCODER | GROUPED | {"attn_logit_softcapping": 50.0},
    "gemma3_text": ENCODER | GROUPED,
    "modernbert": ENCODER,
    "deberta-v2": model_shape("deberta-v3-base").config | {"num_hidden_layers": 3},
    "gpt2": model_shape("gpt2").config | {"n_layer": 3},
}


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", "dora", "nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_bounded_by_what_a_simulation_takes(
    tmp_path: Path, family: str, method: str
) -> None:
    config = FAMILIES[family] | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = {"method": "lora" if family == "gpt2" and method == "dora" else method}
    if method in ("nf4", "int8"):
        how = {"method": "dora", "quantization": method, "dtype": "bfloat16"}
        if family == "gpt2":
            pytest.skip("its layers are not quantized")
    arguments: dict[str, Any] = {
        "name": str(tmp_path),
        **how,
        "weights": "random",
        "precision": "bf16",
        "attention": "varlen",
        "attention_dropout": 0.0,
        "rows": 1,
        "width": 16 * 304,
        "slots": 16,
        "lengths": [304] * 16,
        "micro_batches": 1,
        "checkpointing": "none",
    }
    found = estimate("trainfit.jobs.probes:encoder_step", "h200", **arguments)
    sizes = sizes_of(config)
    assert sizes is not None
    path = "disentangled" if family == "deberta-v2" else "varlen"
    load = Load(tokens=16 * 304, longest=304, attention=path, evaluated=0, captured=False)
    most = bound(sizes, arguments, arguments["method"], load).peak_reserved / 2**30
    assert found.peak_reserved_gib <= most <= 4 * found.peak_allocated_gib


BOUNDED = [
    shape
    for shape in model_shapes()
    if shape.config["model_type"] in _FAMILIES and not shape.config.get("conv_kernel_size")
]


@pytest.mark.parametrize("shape", BOUNDED, ids=lambda shape: shape.slug)
def test_weights_are_counted_and_little_else(shape: Any) -> None:
    sizes = sizes_of(shape.config)
    assert sizes is not None
    narrow = sizes.hidden - shape.config.get("embedding_size", sizes.hidden)  # ELECTRA-small
    heads = (sizes.hidden + 1024) * sizes.hidden  # room for a pooler and 1,024 classes
    most = 1.02 * shape.parameters + heads + narrow * sizes.vocabulary
    assert shape.parameters <= count_weights(sizes) <= most


@pytest.mark.parametrize("name", ["distilbert", "mpnet-base", "pythia-160m", "phi-2", "opt-125m"])
def test_the_weights_of_a_family_without_a_bound_are_estimated(name: str) -> None:
    shape = model_shape(name)
    sizes = sizes_of(shape.config)
    assert sizes is not None
    assert sizes.family not in _FAMILIES
    assert count_weights(sizes) == pytest.approx(shape.parameters, rel=0.05)


def test_sizes_that_are_not_known_are_not_bounded() -> None:
    config = model_shape("bert-base").config
    assert sizes_of({k: v for k, v in config.items() if k != "hidden_size"}) is None
    assert sizes_of(config | {"num_local_experts": 8}) is None
    assert sizes_of(model_shape("deberta-v2-xlarge").config) is None  # it has a convolution


def job(*words: str, gpu: str = "h200") -> JobQuestion:
    composed = compose("nli", ["model.name=bert-base", *words])
    question = job_plan.question(composed)
    return JobQuestion(composed=composed, question=question, profile=as_if(find(gpu)))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the estimates that are asked for, and answer none."""
    asked: list[str] = []

    def stop(*_: Any, **__: Any) -> None:
        asked.append("asked")
        raise RuntimeError("simulated")

    monkeypatch.setattr(planner, "start", stop)
    monkeypatch.setattr(planner.caches, "read", lambda *_: None)
    return asked


def planned(job: JobQuestion, **how: Any) -> Plan:
    return planner.plan(job.question, job.profile, here=True, **how)


def test_with_plenty_of_room_nothing_is_simulated(simulated: list[str]) -> None:
    plan = planned(job("training.effective_batch_size=64"))
    assert not simulated
    assert plan.fits
    assert plan.memory is not None
    assert plan.memory.bound
    assert plan.memory.error_percent is None
    assert plan.memory.peak_reserved_gib <= bounds.PLENTY_CAPTURED * plan.memory.capacity_gib
    assert plan.packed
    assert plan.gradient_accumulation_steps == plan.cuts[0] == 1
    assert plan.gradient_checkpointing == "none"
    assert "at most" in plan.verdict()
    assert "predicted" not in plan.verdict()


def test_the_mfu_of_fp32_is_of_the_rate_that_its_products_run_at(simulated: list[str]) -> None:
    """With TF32 the matrix units multiply; of the peak without them, plans reached 180%."""
    done = []
    for on, dtype in ((False, "fp32"), (True, "tf32")):
        time = planned(job("device.mixed_precision=off", f"device.tf32={on}")).time
        assert time is not None
        assert time.mfu is not None
        assert time.step_seconds is not None
        assert 0.1 < time.mfu < 1
        done.append(time.mfu * time.step_seconds * (find("h200").peak_tflops(dtype) or 0))
    assert done[0] == pytest.approx(done[1])  # the same operations
    assert not simulated


def test_the_page_of_a_bound_says_that_it_is_one(simulated: list[str]) -> None:
    from rich.console import Console

    console = Console(record=True, width=120)
    console.print(plan_page(planned(job())))
    page = console.export_text()
    assert "at most" in page
    assert "upper bound" in page
    assert "predicted" not in page
    assert not simulated


@pytest.mark.parametrize(
    ("words", "gpu", "memory"),
    [
        (("training.effective_batch_size=512",), "a100-40gb", None),  # a bound beyond the room
        ((), "h200", 4.0),
        (("training.effective_batch_size=64",), "t4", None),
        (("model.name=deberta-v3-base",), "t4", None),  # its own attention keeps all scores
    ],
)
def test_where_memory_is_tight_the_step_is_simulated(
    simulated: list[str], words: tuple[str, ...], gpu: str, memory: float | None
) -> None:
    with pytest.raises(RuntimeError, match="simulated"):
        planned(job(*words, gpu=gpu), memory_gib=memory)
    assert simulated


@pytest.mark.parametrize(("name", "coarse"), [("bert-base", False), ("modernbert-tiny", True)])
def test_padded_rows_are_cut_by_padding_or_by_launches(
    simulated: list[str], name: str, coarse: bool
) -> None:
    """A small model waits for each micro-batch's launches; a larger one computes the padding."""
    words = ("optimization.cuda_graph=false", "model.use_flash_attention=false")
    asked = job(f"model.name={name}", *words, gpu="t4")
    plan = planned(asked)
    assert not simulated
    assert not plan.packed
    least = ladder(asked.question.workload.lengths, 16, 16 * 512, padded=True)[0].micro_batches
    assert least > 1
    assert plan.gradient_accumulation_steps == (1 if coarse else least)


def test_a_plan_for_elsewhere_and_an_unknown_model_are_simulated(simulated: list[str]) -> None:
    asked = job()
    with pytest.raises(RuntimeError, match="simulated"):
        planner.plan(asked.question, asked.profile)
    sizes = replace(asked.question.sizes, family="mamba")  # type: ignore[type-var]
    with pytest.raises(RuntimeError, match="simulated"):
        planned(replace(asked, question=replace(asked.question, sizes=sizes)))
    assert len(simulated) == 2


def test_the_cut_of_a_bound_is_the_one_that_all_folds_fit(simulated: list[str]) -> None:
    asked = job("training.effective_batch_size=16")
    short = replace(asked.question.workload, lengths=(20, 30, 40) * 50, sequences=150)
    question = replace(asked.question, workload=short, more_folds=((200, 300, 400) * 50,))
    plan = planned(replace(asked, question=question))
    assert plan.gradient_accumulation_steps == 1
    assert plan.micro_batch_tokens >= 16 * 300
    assert not simulated
