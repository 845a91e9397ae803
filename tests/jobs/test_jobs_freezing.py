"""`model.freeze_encoder=auto` freezes where memory holds the encoder in no other way."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from job_tiny import be_quick, quick_plan, write_redsm5
from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.plan_records import MemoryEstimate, Plan
from trainfit.core.records import HardwareProfile
from trainfit.core.settings import with_values
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.hardware.model_shapes import model_shape
from trainfit.jobs import job_plan
from trainfit.planning import planner
from trainfit.planning.estimator.estimate import CONTEXT_GIB, GIB
from trainfit.planning.question import Question

Fits = Callable[[Question], bool]
LARGE = "training.batch_size=64"


def only_frozen(question: Question) -> bool:
    return question.workload.method == "frozen"


def only_small(question: Question) -> bool:
    return question.pinned("batch_size") != 64


def never(_question: Question) -> bool:
    return False


def always(_question: Question) -> bool:
    return True


def holding(fits: Fits) -> Callable[..., Plan]:
    """A planner for a machine that holds some questions and not others."""

    def plan(question: Question, profile: HardwareProfile, **more: Any) -> Plan:
        nothing = dict.fromkeys(("weights_gib", "gradients_gib", "optimizer_gib"), 0.0)
        memory = MemoryEstimate(
            **nothing,
            activations_gib=0.0,
            workspace_gib=0.0,
            peak_allocated_gib=20.0,
            peak_reserved_gib=20.0,
            capacity_gib=14.0,
            fits=fits(question),
            error_percent=None,
        )
        return replace(quick_plan(question, profile, **more), fits=fits(question), memory=memory)

    return plan


@pytest.mark.parametrize(
    ("fits", "words", "method", "held"),
    [
        (always, (), "dora", True),
        (only_frozen, (), "frozen", True),
        (only_frozen, ("hardware=t4",), "frozen", True),
        (never, (), "dora", False),
        # What is too large here is the batch that was set, not the method.
        (only_small, (LARGE,), "dora", False),
        (only_frozen, (LARGE,), "frozen", True),
        # What the user sets is kept.
        (only_frozen, ("model.method=lora",), "lora", False),
        (only_frozen, ("model.freeze_encoder=false",), "dora", False),
        (always, ("model.freeze_encoder=true",), "frozen", True),
        # Random weights are worth nothing frozen.
        (only_frozen, ("model.weights=random",), "dora", False),
    ],
)
def test_what_is_frozen(
    fits: Fits,
    words: tuple[str, ...],
    method: str,
    held: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(planner, "plan", holding(fits))
    made = job_plan.plan("nli", *words, gpu="t4", lengths=[20] * 40)
    assert (made.workload.method, made.fits) == (method, held)
    assert made.task.arguments["method"] == method
    said = {reason.setting: reason for reason in made.reasons}
    free = not any(word.startswith("model.") for word in words)
    assert ("freeze_encoder" in said) == free
    if free:
        assert said["freeze_encoder"].value is (method == "frozen")
    if free and method == "frozen":
        assert said["freeze_encoder"].why.startswith("dora needs 20.0 GiB of 14.0")


def test_what_fits_by_a_saver_is_not_frozen(monkeypatch: pytest.MonkeyPatch):
    def offloading(*given: Any, **more: Any) -> Plan:
        return with_values(holding(always)(*given, **more), {"offload_optimizer": True})

    monkeypatch.setattr(planner, "plan", offloading)
    made = job_plan.plan("nli", gpu="t4", lengths=[20] * 40)
    [said] = [reason for reason in made.reasons if reason.setting == "freeze_encoder"]
    assert said.value is False
    assert said.why == "dora fits with offload_optimizer=true, and what fits in some way is trained"


def test_a_gpt_has_nothing_to_freeze(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "plan", holding(never))
    assert job_plan.plan("gpt", gpu="t4").workload.method == "full"


def test_plan_dry_run_and_training_freeze_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    monkeypatch.setattr(planner, "plan", holding(only_frozen))
    monkeypatch.setattr(job_plan, "assumed_lengths", lambda *_: np.full(40, 20))
    words = [
        *("model.name=modernbert-tiny", "model.freeze_encoder=auto", "training.max_steps=2"),
        f"data.data_dir={write_redsm5(tmp_path / 'data')}",
        *(f"runs_dir={tmp_path / 'runs'}", "data.max_length=64", "baselines=false"),
    ]
    found = []
    for command in (["plan"], ["train", "--dry-run"], ["train"]):
        assert run([command[0], "nli", *command[1:], "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    [folder] = (tmp_path / "runs").iterdir()
    plans = [found[0], found[1]["plan"], json.loads((folder / "plan.json").read_text())]
    assert [plan["workload"]["method"] for plan in plans] == ["frozen"] * 3
    for plan in plans:
        [reason] = [r for r in plan["reasons"] if r["setting"] == "freeze_encoder"]
        assert reason["value"] is True
    [saved] = (folder / "checkpoints").glob("*/model.safetensors")
    assert set(load_file(saved)) == {"head.weight", "head.bias"}


def test_every_gpu_of_a_comparison_decides_for_itself(monkeypatch: pytest.MonkeyPatch):
    """By arithmetic: 4 bytes each for weight and gradient, 8 for the optimizer's states."""

    def compare(question: Question, specs: Any) -> list[tuple[str, Plan]]:
        def fits(asked: Question, spec: Any) -> bool:
            size = 2 if asked.workload.method == "frozen" else 16
            return 1.2e9 * size < (spec.memory_gib - CONTEXT_GIB) * GIB

        return [(s.slug, holding(lambda q, s=s: fits(q, s))(question, as_if(s))) for s in specs]

    monkeypatch.setattr(planner, "compare", compare)
    words = ["model.freeze_encoder=auto", "model.name=gemma-3-1b-it", "data.max_length=64"]
    specs = [find(name) for name in ("t4", "4090", "h200")]
    rows = dict(job_plan.plan_all(compose("textclass", words), among=specs))
    assert list(rows) == [spec.slug for spec in specs]
    assert [p.workload.method for p in rows.values()] == ["frozen", "full", "full"]
    assert all(plan.fits for plan in rows.values())


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("TRAINFIT_SOAK"), reason="set TRAINFIT_SOAK=1, or make soak")
def test_four_billion_weights_are_frozen_on_a_t4_by_the_estimator():
    """A billion are trained in full, with their moments on the host; four take it all alone."""
    sizes = {}
    for name in ("gemma-3-1b-it", "gemma-3-4b-it"):
        shape = model_shape(name).config
        embedding = shape["vocab_size"] * shape["hidden_size"]
        blocks = shape["num_hidden_layers"] * 3 * shape["hidden_size"] * shape["intermediate_size"]
        sizes[name] = embedding + blocks
    assert 16 * sizes["gemma-3-1b-it"] > 13 * GIB
    assert 4 * sizes["gemma-3-4b-it"] > 11 * GIB
    words = ("model.freeze_encoder=auto", "model.name=gemma-3-1b-it")
    whole = job_plan.plan("textclass", *words, gpu="t4")
    assert (whole.workload.method, whole.fits, whole.offload_optimizer) == ("full", True, True)
    large = ("model.freeze_encoder=auto", "model.name=gemma-3-4b-it")
    made = job_plan.plan("textclass", *large, gpu="t4")
    assert (made.workload.method, made.fits) == ("frozen", True)
    adapted = job_plan.plan("textclass", *words, "model.method=dora", gpu="t4")
    assert (adapted.workload.method, adapted.fits) == ("dora", True)
