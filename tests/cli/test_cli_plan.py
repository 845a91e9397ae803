"""`trainfit plan` as a program and as a person sees it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import run
from trainfit.hardware import detect
from trainfit.hardware.catalogue import find, gpus
from trainfit.planning.estimator.estimate import CONTEXT_GIB

MEMORY = {
    "weights_gib",
    "adapters_gib",
    "gradients_gib",
    "optimizer_gib",
    "activations_gib",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "capacity_gib",
}
TIME = {
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "epoch_seconds",
    "total_seconds",
    "error_percent",
}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "bert",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 500,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ["plan", "nli", "--model", str(folder), "model.method=full", "data.max_length=64"]


def test_json_has_what_programs_rely_on(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run([*words, "--gpu", "h200", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] is True
    assert made["precision"] == "bf16"
    assert made["effective_batch_size"] == 16
    for key in ("batch_size", "micro_batch_tokens", "gradient_accumulation_steps"):
        assert made[key] >= 1
    assert made["gradient_checkpointing"] == "none"
    assert isinstance(made["compile"], bool)
    assert made["memory"].keys() >= MEMORY
    assert made["time"].keys() >= TIME
    assert {"setting", "value", "why"} <= made["reasons"][0].keys()


def test_adapters_have_a_row_of_their_own(words: list[str], capsys: pytest.CaptureFixture[str]):
    asked = [word.replace("method=full", "method=dora") for word in words]
    asked += ["model.lora_rank=16", "--gpu", "h200"]
    assert run([*asked, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    # Four projections of 64 by 64 in each of two layers: two thin matrices, a row of magnitudes.
    adapters = 2 * 4 * (16 * 64 + 64 * 16 + 64) * 4
    assert memory["adapters_gib"] * 2**30 == pytest.approx(adapters)
    assert run(asked) == 0
    rows = capsys.readouterr().out.partition("Memory in GiB")[2].split("\n")
    assert [row.split()[0] for row in rows[1:4]] == ["part", "weights", "adapters"]


def test_a_gpu_without_records_has_no_error_bar(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run([*words, "--gpu", "t4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["precision"] == "fp16"
    assert made["time"]["error_percent"] is None
    assert made["time"]["samples_per_second"] > 0


@pytest.mark.parametrize("form", ["table", "hf", "lightning", "accelerate", "hydra", "shell"])
def test_every_format_prints_something_that_names_the_batch(
    words: list[str], form: str, capsys: pytest.CaptureFixture[str]
):
    assert run([*words, "--gpu", "h200", "--format", form]) == 0
    shown = capsys.readouterr().out
    assert "batch" in shown or "mixed_precision" in shown or "precision" in shown


def test_a_picture_is_drawn(words: list[str], tmp_path: Path):
    picture = tmp_path / "memory.svg"
    assert run([*words, "--gpu", "h200", "--plot", str(picture)]) == 0
    assert picture.read_text().startswith("<svg")


@pytest.mark.soak
def test_all_gpus_are_compared_in_one_table(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run([*words, "--gpu", "all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(gpus())
    fitting = [row["fits"] for row in rows]
    assert fitting == sorted(fitting, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nli", "--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["nli", "--gpu", "rtx-9999"], "unknown GPU 'rtx-9999'"),
        (["nli", "data.max_length=-5"], "data.max_length is -5"),
        (["nli", "--gpu", "t4", "--memory", "-3"], "'--memory': -3.0 is not in the range"),
        (["nli", "--gpu", "t4", "device.memory_gib=0"], "device.memory_gib is 0"),
        (["nli", "--gpu", "all", "--format", "hf"], "--gpu all makes one table"),
        (["nli", "--gpu", "t4", "--price", "-1"], "'--price': -1.0 is not in the range"),
        (["nil", "--gpu", "t4"], "unknown job 'nil'"),
        (["nli", "--gpu", "t4", "--format", "toml"], "'toml' is not one of"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert len(told.err.strip().splitlines()) == 1


def test_memory_without_a_gpu_asks_for_one_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainfit.jobs.job_plan.detect", lambda: replace(detect(), gpus=()))
    assert run([*words, "--memory", "8"]) == 2
    *_, told = capsys.readouterr().err.strip().splitlines()
    assert "device.memory_gib=8 bounds a GPU, and there is none here" in told
    assert "--gpu" in told


def test_a_cap_is_part_of_the_plan_and_of_what_trains_by_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run([*words, "--gpu", "h200", "--memory", "1.5", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["memory"]["capacity_gib"] == 1.5
    assert made["runtime"]["memory_gib"] == 1.5
    assert run([*words, "--gpu", "h200", "--memory", "1.5", "--format", "hydra"]) == 0
    assert "device.memory_gib=1.5" in capsys.readouterr().out.splitlines()


def test_a_cap_above_the_memory_of_the_gpu_is_the_gpu(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run([*words, "--gpu", "t4", "--memory", "500", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["capacity_gib"] == pytest.approx(find("t4").memory_gib - CONTEXT_GIB)
