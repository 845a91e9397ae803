"""How steps are run: times by operations against recorded ones, weighed for the whole job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainfit.conf import compose
from trainfit.core.plan_records import Plan
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.hardware.model_shapes import model_shape, sizes_of
from trainfit.jobs import job_plan
from trainfit.packing import PackedCut
from trainfit.planning import decide, explain, planner
from trainfit.planning.estimator import step_time
from trainfit.planning.estimator.depths import Taken
from trainfit.planning.estimator.step_time import Done, Work, host_link, rates
from trainfit.planning.execution import (
    BUDGETS,
    Way,
    execution,
    family_compiling,
    flops_of,
    keep_activations,
    largest_budget,
    ways_of,
)
from trainfit.planning.fit import PARTS, Cutting, StepCandidate
from trainfit.planning.question import Choice, Pin

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = find("h200")


def cutting(arguments: dict[str, Any]) -> Cutting:
    tokens, count = arguments["rows"] * arguments["width"], arguments["micro_batches"]
    cut = PackedCut(part_size=1, micro_batches=count, budgets=(tokens,), slots=1)
    return Cutting(
        cut=cut,
        rows=arguments["rows"],
        width=arguments["width"],
        lengths=tuple(arguments.get("lengths") or ()),
        computed=count * tokens,
        tokens=count * tokens,
    )


def recorded_steps() -> list[tuple[dict[str, Any], bool, float]]:
    """Packed steps and those of a GPT on an H200, without checkpointing, and their seconds."""
    found = []
    for name in ("2026-11-15-jobs-h200.json", "2026-11-15-capped-h200.json"):
        for row in json.loads((RESULTS / name).read_text())["results"]:
            arguments = row["case"]["arguments"]
            plain = arguments.get("slots") is None and "gpt" not in arguments["name"]
            if "error" in row or plain or arguments["checkpointing"] != "none":
                continue
            compiled = bool(arguments.get("compile")) or row["case"].get("how") == "blocks"
            found.append((arguments, compiled, row["median_step_seconds"]))
    return found


def test_times_by_operations_are_near_the_recorded_ones() -> None:
    errors = []
    for arguments, compiled, seconds in recorded_steps():
        sizes = sizes_of(model_shape(arguments["name"]).config)
        assert sizes is not None
        method = arguments.get("method", "full")
        found = rates(H200, arguments["precision"], True)
        ways = ways_of(sizes, method, cutting(arguments), found)
        [way] = [w for w in ways if w.compile == compiled and not w.cuda_graph]
        errors.append(abs(way.seconds / seconds - 1))
    assert len(errors) > 20
    assert np.median(errors) < 0.08
    assert np.quantile(errors, 0.9) < 0.25


@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it", "gpt-124m"])
def test_operations_are_those_of_the_usual_count(name: str) -> None:
    shape = model_shape(name)
    sizes = sizes_of(shape.config)
    assert sizes is not None
    embeddings = shape.config["vocab_size"] * (sizes.hidden if name != "gpt-124m" else 0)
    per_token = flops_of(sizes, "full").of_step([1])
    assert per_token == pytest.approx(6 * (shape.parameters - embeddings), rel=0.02)


def test_a_captured_step_waits_for_no_launch() -> None:
    sizes = sizes_of(model_shape("bert-base").config)
    assert sizes is not None
    small = cutting({"rows": 1, "width": 4864, "lengths": [304] * 16, "micro_batches": 1})
    ways = ways_of(sizes, "full", small, rates(H200, "bf16"))
    seconds = {(way.compile, way.cuda_graph): way.seconds for way in ways}
    assert seconds[False, True] < 0.6 * seconds[False, False]
    assert seconds[True, True] < seconds[False, True]
    # 16 samples took 10.7 ms captured and 8.5 ms compiled as well.
    assert seconds[False, True] == pytest.approx(0.0107, rel=0.25)
    assert seconds[True, True] == pytest.approx(0.0085, rel=0.25)
    assert ways_of(sizes, "full", small, None) == []


def question(folds: int, *words: str) -> Any:
    composed = compose("nli", ["model.name=bert-base", "training.num_epochs=2", *words])
    lengths = job_plan.assumed_lengths("nli", 512)[:2000].tolist()
    return job_plan.question(composed, lengths, folds=[lengths] * (folds - 1))


def planned(asked: Any) -> Plan:
    return planner.plan(asked, as_if(H200), here=True)


def test_compiling_is_judged_for_all_folds_together() -> None:
    one, many = planned(question(1)), planned(question(40))
    assert one.workload.trainings == 1
    assert many.workload.trainings == 40
    assert not one.compile
    assert many.compile
    assert one.cuda_graph
    assert many.cuda_graph
    assert "of the job" in next(r.why for r in many.reasons if r.setting == "compile")
    assert many.time is not None
    assert one.time is not None
    assert many.time.step_seconds < one.time.step_seconds
    assert many.time.error_percent is None  # no error was recorded for such times


def test_pins_and_obstacles_decide_before_times_do() -> None:
    asked, here = question(1), as_if(H200)
    ways = [Way(seconds=2.0), Way(compile=True, seconds=1.0)]
    assert execution(asked, here, ways, 1000, captured=False)[0] == ways[1]
    pinned = replace(asked, pins={"compile": Pin(value=False, origin="override")})
    assert execution(pinned, here, ways, 1000, captured=False)[0] == ways[0]
    nowhere = replace(here, gpus=())
    way, choice = execution(asked, nowhere, ways, 1000, captured=False)
    assert way == ways[0]
    assert not choice.value
    way, choice = execution(asked, here, [], 1000, captured=False)
    assert way is None
    assert "not known" in choice.why


@pytest.mark.parametrize(
    ("words", "there", "why"),
    [
        ((), True, "copied once"),
        (("training.num_workers=4",), False, "training.num_workers asks"),
        (("training.num_workers=4", "training.data_on_gpu=true"), True, "you set it"),
        (("training.data_on_gpu=false",), False, "you set it"),
        (("model.freeze_encoder=true",), False, "on the host"),
    ],
)
def test_small_data_is_kept_on_the_gpu(words: tuple[str, ...], there: bool, why: str) -> None:
    asked = question(1, *words)
    found = explain.data_on_gpu(asked, as_if(find("t4")).gpu)
    assert found.value is there
    assert why in found.why
    assert explain.data_on_gpu(asked, None).value is False


def test_data_beyond_a_share_of_the_gpu_stays_on_the_host() -> None:
    asked = question(1)
    many = replace(asked.workload, sequences=10**6)
    found = explain.data_on_gpu(replace(asked, workload=many), as_if(find("t4")).gpu)
    assert found.value is False
    assert "too many" in found.why


@pytest.mark.parametrize(
    ("asked_for", "gpu", "method", "value", "said"),
    [
        (None, "t4", "full", False, "stay on the GPU"),
        (True, "t4", "full", True, "you set it"),
        (False, "t4", "full", False, "you set it"),
        (True, None, "full", False, "there is no GPU to take them from"),
        (True, "t4", "frozen", False, "a frozen encoder saves none"),
    ],
)
def test_activations_go_to_the_host_where_it_is_asked_for_and_can_be(
    asked_for: bool | None, gpu: str | None, method: Any, value: bool, said: str
):
    question = job_plan.question(compose("nli", ["model.name=bert-base"]), [100] * 64)
    pins = {} if asked_for is None else {"offload_activations": asked_for}
    question = replace(
        question,
        pins={name: Pin(value=wanted, origin="override") for name, wanted in pins.items()},
        workload=replace(question.workload, method=method),
    )
    profile = as_if(find(gpu or "t4"))
    found = decide.offloaded(question, profile.gpu if gpu else None)
    assert found.value is value
    assert said in found.why
    graph = decide.captured(question, profile, "none")
    if value:
        assert "to the host and back" in graph.why


def test_transfers_run_beside_the_kernels():
    """A T4's PCIe 3.0 x16 moves 12 GB in a second; the longer of the two counts."""
    gpu = find("t4")
    found = rates(gpu, "fp16")
    assert found is not None
    assert found.link == 12e9
    assert host_link(find("h200"))[0] == 4 * found.link
    moved = Work(
        kind="transfer",
        flops=0,
        skipped=0,
        nbytes=10**9,
        half=False,
        aligned=True,
        backward=False,
        update=False,
    )
    spent = step_time.seconds([Done(work=moved, times=10)], found)
    assert spent.step() == pytest.approx(10e9 / found.link)
    busy = replace(moved, kind="copy", nbytes=10**12)
    assert (
        step_time.seconds([Done(work=moved, times=1), Done(work=busy, times=1)], found).step() > 1
    )


def step(fits: bool, seconds: float, checkpointing: Any = "none") -> StepCandidate:
    nothing: dict[str, Any] = dict.fromkeys((*PARTS, "peak_allocated", "peak_reserved"), 0.0)
    return StepCandidate(
        checkpointing=checkpointing,
        cutting=cutting({"rows": 1, "width": 8, "micro_batches": 1}),
        taken=Taken(**nothing, fits=fits, done=()),
        seconds=seconds,
        flops=0.0,
    )


@pytest.mark.parametrize("most", [*BUDGETS, 0.0])
def test_the_largest_budget_that_fits_is_found_with_few_steps(most: float):
    tried: list[float] = []

    def run(share: float) -> StepCandidate:
        tried.append(share)
        return step(share <= most, 1.0)

    found = largest_budget(run)
    assert (0.0 if found is None else found[0]) == most
    assert len(tried) <= 3


@pytest.mark.parametrize(
    ("most", "seconds", "pins", "kept"),
    [
        (1.0, 1.0, {}, {"gradient_checkpointing": "none", "cuda_graph": False}),
        (
            0.4,
            1.0,
            {},
            {"gradient_checkpointing": "none", "cuda_graph": False, "activation_budget": 0.4},
        ),
        (0.4, 1.3, {}, {}),  # slower than blocks that are computed again
        (0.0, 1.0, {}, {}),
        (0.4, 1.0, {"activation_budget": 1.0}, {}),
        (0.4, 1.0, {"gradient_checkpointing": "full"}, {}),
    ],
)
def test_activations_are_kept_by_a_budget_where_that_is_faster(
    most: float, seconds: float, pins: dict[str, Any], kept: dict[str, Any]
):
    question = job_plan.question(compose("nli", ["model.name=bert-base"]), [100] * 64)
    pinned = {name: Pin(value=value, origin="override") for name, value in pins.items()}
    best = step(True, 1.2, "full")
    made, choices = keep_activations(
        replace(question, pins=pinned),
        best,
        Choice(value=True, why=""),
        lambda share: step(share <= most, seconds),
    )
    assert {name: choice.value for name, choice in choices.items()} == kept
    assert made.checkpointing == ("none" if kept else "full")
    if kept:
        [other] = choices["gradient_checkpointing"].alternatives
        assert other == "full: 0.0 GiB, +20% time"


def test_a_budget_is_taken_as_asked():
    question = job_plan.question(compose("nli", ["model.name=bert-base"]), [100] * 64)
    profile = as_if(find("t4"))
    assert decide.activation_budget(question).value == 1.0
    pinned = replace(question, pins={"activation_budget": Pin(value=0, origin="override")})
    assert decide.activation_budget(pinned).value == 0.0
    assert planner.fixed_settings(pinned, profile, 1).arguments["activation_budget"] == 0.0
    assert "activation_budget" not in planner.fixed_settings(question, profile, 1).arguments


AHEAD = 0.7
"""Share of the recorded compile times: torch's compilers are started ahead since."""


def test_compiling_takes_what_it_took_for_each_model() -> None:
    results = json.loads((RESULTS / "2026-11-15-jobs-h200.json").read_text())["results"]
    errors = []
    for row in results:
        arguments, took = row["case"]["arguments"], row.get("first_two_seconds", 0)
        if row["case"].get("how") != "blocks" or took < 3:  # not compiled, or cached
            continue
        sizes = sizes_of(model_shape(arguments["name"]).config)
        assert sizes is not None
        expected, _ = family_compiling(sizes.family, 16, arguments.get("method", "full"))
        errors.append(abs(expected / (AHEAD * took) - 1))
    assert len(errors) == 8
    assert max(errors) < 0.42
    assert np.median(errors) < 0.25
