"""Optimizers of a configuration, from the command to the receipt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gpt_tiny
import job_tiny
from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.plan_records import Plan
from trainfit.engine import setup
from trainfit.engine.optimizer import build_optimizer
from trainfit.integrations.plan_exports import FORMATS
from trainfit.measuring.trace import Evidence

KINDS = ("adamw_bf16", "adamw_8bit", "adafactor", "muon")


def trained(task: str, tmp: Path, patch: pytest.MonkeyPatch, *more: str) -> Path:
    module = gpt_tiny if task == "gpt" else job_tiny
    module.be_quick(patch)
    if task == "gpt":
        words = gpt_tiny.gpt_words(tmp, *more)
    else:
        words = job_tiny.nli_words(tmp, "training.num_epochs=1", *more)
    assert run(["train", task, *words]) == 0
    (folder,) = (tmp / "runs").iterdir()
    return folder


def receipt(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict]]:
    capsys.readouterr()
    code = run(["verify", str(folder), "--json", "--strict"])
    items = json.loads(capsys.readouterr().out)["items"]
    return code, {item["name"]: item for item in items}


@pytest.mark.parametrize(
    ("task", "kind"), [*(("nli", kind) for kind in KINDS), ("gpt", "adamw_bf16"), ("gpt", "muon")]
)
def test_what_was_asked_for_trains_and_is_in_the_receipt(
    task: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = trained(task, tmp_path, monkeypatch, f"optimization.optimizer={kind}")
    assert Plan.load(folder / "plan.json").optimizer == kind
    code, items = receipt(folder, capsys)
    assert code == 0
    found = items["optimizer"]
    assert (found["requested"], found["observed"], found["status"]) == (kind, kind, "active")
    assert "state: " in found["evidence"]
    assert items["offload_optimizer"]["status"] == "not_applicable"


@pytest.mark.parametrize("kind", ["adamw_bf16", "adafactor"])
def test_another_optimizer_than_the_plans_is_noticed(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        setup,
        "build_optimizer",
        lambda model, settings: build_optimizer(model, replace(settings, kind="adamw_fused")),
    )
    folder = trained("nli", tmp_path, monkeypatch, f"optimization.optimizer={kind}")
    code, items = receipt(folder, capsys)
    assert code == 1
    found = items["optimizer"]
    assert (found["observed"], found["status"]) == ("adamw_fused", "not_active")
    assert kind in found["mend"]


def test_moments_of_another_dtype_are_noticed(tmp_path: Path) -> None:
    from trainfit.measuring.receipt import judge

    seen = Evidence(
        step=1,
        device="cuda",
        updates={"own": 1},
        optimizers={"SmallAdamW": "own"},
        moments={"float32 on cuda": 100},
    )
    assert judge("optimizer", "adamw_bf16", seen).status == "not_active"
    assert judge("offload_optimizer", True, seen).status == "not_active"
    there = replace(seen, moments={"bfloat16 on the host": 100}, fetched=4)
    assert judge("optimizer", "adamw_bf16", there).status == "active"
    assert judge("offload_optimizer", True, there).status == "active"
    assert judge("offload_optimizer", False, seen).status == "off"


@pytest.mark.parametrize(
    ("kind", "offloaded", "expected"),
    [
        ("adamw_fused", False, "adamw_torch_fused"),
        ("adamw_8bit", False, "adamw_bnb_8bit"),
        ("adafactor", False, "adafactor"),
        ("adamw_fused", True, "paged_adamw_32bit"),
        ("muon", False, "adamw_torch_fused"),
    ],
)
def test_exports_name_transformers_own(kind: str, offloaded: bool, expected: str) -> None:
    from plan_example import make_plan

    plan = replace(make_plan(), optimizer=kind, offload_optimizer=offloaded)
    made = FORMATS["hf"](plan, compose("nli", ()))
    assert f'"{expected}"' in made.text or f"'{expected}'" in made.text
    said = any("muon is trainfit's own" in note for note in made.notes)
    assert said is (kind == "muon")
