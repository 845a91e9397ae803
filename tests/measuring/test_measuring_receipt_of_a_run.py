"""Every run has a receipt, `trainfit verify` reads it, and it does not take the plan's word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from job_tiny import be_quick, nli_words
from trainfit.cli.main import run
from trainfit.engine import setup
from trainfit.engine.optimizer import build_optimizer
from trainfit.measuring.trace import Evidence


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def trained(tmp_path: Path, *more: str) -> Path:
    assert run(["train", "nli", *nli_words(tmp_path, "training.num_epochs=1", *more)]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def verified(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capsys.readouterr()
    code = run(["verify", str(folder), *options])
    return code, capsys.readouterr().out


def test_a_run_has_a_receipt_that_verify_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = trained(tmp_path)
    code, out = verified(folder, capsys, "--json", "--strict")
    assert code == 0
    told = json.loads(out)
    found = {item["name"]: item for item in told["items"]}
    assert found["fused_optimizer"]["status"] == "active"
    assert found["effective_batch"]["observed"] == found["effective_batch"]["requested"]
    assert found["gradient_clipping"]["status"] == "active"
    assert all(item["status"] != "not_active" for item in told["items"])
    evidence = Evidence.load(folder / "evidence.json")
    assert evidence.step > 0
    assert evidence.optimizers == {"AdamW": "fused"}
    assert evidence.batches.padding_share is not None

    code, page = verified(folder, capsys, "--markdown")
    heads = [line for line in page.splitlines() if line.startswith("## ")]
    assert [head.split(" ", 2)[-1] for head in heads[1:]] == [
        "ENABLED OPTIMIZATIONS",
        "DISABLED/NOT ACTIVE OPTIMIZATIONS",
        "PERFORMANCE METRICS",
        "RECOMMENDED IMPROVEMENTS",
        "CONCLUSION",
    ]
    assert "it/s" in page
    assert page.index("### High Priority") < page.index("### Medium Priority")
    target = tmp_path / "status.md"
    assert verified(folder, capsys, "--output", str(target)) == (0, f"{target}\n")
    assert target.read_text() == page
    _, table = verified(folder, capsys)
    assert "Everything that was asked for was active." in table


def test_an_optimizer_flipped_behind_the_plans_back_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from dataclasses import replace

    monkeypatch.setattr(
        setup,
        "build_optimizer",
        lambda model, settings: build_optimizer(model, replace(settings, kind="adamw")),
    )
    folder = trained(tmp_path)
    code, out = verified(folder, capsys, "--json", "--strict")
    assert code == 1
    found = {item["name"]: item for item in json.loads(out)["items"]}
    item = found["fused_optimizer"]
    assert (item["requested"], item["observed"], item["status"]) == (True, False, "not_active")
    assert item["mend"]
    assert verified(folder, capsys)[0] == 0  # without --strict it only tells
    assert "### High Priority:\n1. **Fused Optimizer**" in verified(folder, capsys, "--markdown")[1]


def test_looking_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = trained(tmp_path, "training.profile_step=false")
    assert not (folder / "evidence.json").exists()
    assert not (folder / "receipt.json").exists()
    assert verified(folder, capsys)[0] == 2
