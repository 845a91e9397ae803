"""check, plan, train --dry-run and get_recommended_config give one answer to one question."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_tiny import nli_words
from trainfit import hardware, hardware_optimizer
from trainfit.cli.main import run
from trainfit.core.records import CompileSupport, Cpu, HardwareProfile
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find
from trainfit.jobs import configuration, job_plan, tuned_plans
from trainfit.jobs.nli import prepare
from trainfit.planning import cpu_choice

GPUS = ("t4", "rtx-3090", "rtx-4090", "a100", "h200")
CORES = 6
SAME = (
    "precision",
    "batch_size",
    "gradient_accumulation_steps",
    "compile",
    "num_workers",
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny job with data of its own."""
    return nli_words(tmp_path_factory.mktemp("job"), "training.max_steps=20000")


@pytest.fixture(scope="module")
def lengths(words: list[str]) -> Any:
    """The tokens of its training sequences, which `train` sees and the others must assume."""
    return prepare(configuration.configure("nli", words)).datasets[0].train.lengths


def machine(slug: str | None, *, bf16: bool = True) -> HardwareProfile:
    """A machine with this GPU, or with none, as detect() would describe it."""
    base = as_if(find(slug or "t4"))
    return replace(
        base,
        gpus=base.gpus if slug else (),
        cpu=Cpu(name="a processor", cores=CORES, host_cores=CORES, native_bf16=bf16),
        compile=CompileSupport(c_compiler="cc", python_headers=True, triton="3.6"),
        memory_available_gib=16.0,
        simulated=False,
    )


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, words: list[str], lengths: Any) -> Any:
    """Make the machine be the one that is given, and the tiny job on its data the default one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(tuned_plans, "OVERRIDES", tuple(words))
    monkeypatch.setattr(job_plan, "assumed_lengths", lambda _task, _longest: lengths)

    def put(profile: HardwareProfile) -> list[str]:
        for module in (hardware, job_plan, hardware_optimizer):
            monkeypatch.setattr(module, "detect", lambda: profile)
        return words

    return put


def said(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """The settings by each of the four, with the same names."""
    for plan in (
        said(capsys, "plan", "nli", *words),
        said(capsys, "train", "nli", *words, "--dry-run")["plan"],
    ):
        again = plan["gradient_checkpointing"] != "none"
        tf32, threads = plan["runtime"]["tf32"], plan["runtime"]["num_threads"]
        shared = {name: plan[name] for name in SAME}
        yield shared | {"gradient_checkpointing": again, "tf32": tf32, "num_threads": threads}
    names = (*SAME, "gradient_checkpointing", "tf32", "num_threads")
    check = said(capsys, "check")["recommended"]
    yield {name: check[name] for name in names}
    config = hardware_optimizer.get_recommended_config()
    assert config.pop("model") == check["model"]
    assert config.pop("mixed_precision") == {"fp32": False}.get(
        check["precision"], check["precision"]
    )
    yield {name: check[name] for name in names} | config


@pytest.mark.parametrize("slug", [None, *GPUS])
def test_the_four_agree(slug: str | None, put: Any, capsys: pytest.CaptureFixture[str]):
    words = put(machine(slug))
    plan, dry_run, check, config = answers(words, capsys)
    assert plan == dry_run == check == config
    if slug is not None:
        spec = find(slug)
        assert plan["precision"] == ("bf16" if spec.native_bf16 else "fp16")
        assert plan["tf32"] == spec.native_tf32
        assert plan["num_workers"] == 4  # of six cores two are the training process's
        assert plan["num_threads"] is None
    else:
        assert (plan["precision"], plan["num_threads"]) == ("fp32", CORES)  # as conftest times it


def test_plan_compiles_where_train_does(put: Any, capsys: pytest.CaptureFixture[str]):
    """By two estimates of what compiling saves, `plan` never compiled this job."""
    words = put(machine("h200"))
    for steps, compiled in ((20_000, False), (200_000, True)):
        job = [*words, f"training.max_steps={steps}", "optimization.cuda_graph=false"]
        assert said(capsys, "train", "nli", *job, "--dry-run")["plan"]["compile"] is compiled
        assert said(capsys, "plan", "nli", *job)["compile"] is compiled


def test_the_four_follow_the_timing(
    put: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def times(_asked: str) -> cpu_choice.StepTimes:
        one = cpu_choice.StepTime(precision="fp32", threads=CORES, seconds=0.027)
        return cpu_choice.StepTimes(times=(one, replace(one, precision="bf16", seconds=0.02)))

    monkeypatch.setattr(cpu_choice, "time_steps", times)
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    plan, dry_run, check, config = answers(put(machine(None)), capsys)
    assert plan == dry_run == check == config
    assert plan["precision"] == "bf16"


def test_a_gpu_elsewhere_has_cores_of_its_own(put: Any, capsys: pytest.CaptureFixture[str]):
    words = put(machine(None))
    plan = said(capsys, "plan", "nli", *words, "--gpu", "rtx-3090")
    check = said(capsys, "check", "--gpu", "rtx-3090")
    recommended = check["recommended"]
    assert {name: plan[name] for name in SAME} == {name: recommended[name] for name in SAME}
    assert check["cpu"] == {
        "name": "assumed",
        "cores": 8,
        "host_cores": 8,
        "native_bf16": False,
        "assumed": True,
    }
    assert plan["num_workers"] == 6
    cores = "8 usable cores beside the GPU, which is not in this machine"
    assert plan["assumptions"][-1] == cores
    reasons = {reason["setting"]: reason["why"] for reason in plan["reasons"]}
    assert reasons["num_workers"].startswith("8 assumed cores less two")
    assert run(["plan", "nli", *words, "--gpu", "rtx-3090"]) == 0
    assert "Assumed: 8 usable cores beside the GPU" in capsys.readouterr().out


def test_the_page_names_the_model(put: Any, capsys: pytest.CaptureFixture[str]):
    words = put(machine("t4"))
    name = next(word for word in words if word.startswith("model.name=")).partition("=")[2]
    assert run(["check"]) == 0
    # Lines end where the path's length puts them, within a word or at a space.
    page = "".join(capsys.readouterr().out.split())
    line = f"For nli with {name} (full, up to 80 tokens), as `trainfit plan nli` has them"
    assert line.replace(" ", "") in page


@pytest.mark.parametrize("how", [["plan"], ["train"], ["train", "--dry-run"], ["tune"]])
def test_what_plan_refuses_train_refuses_before_it_makes_a_folder(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """There was a second road to a plan, which did not look at Liger."""
    monkeypatch.chdir(tmp_path)
    command, *flags = how
    assert run([command, "textclass", "optimization.liger=true", *flags]) == 2
    assert "optimization.liger is true, and" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))
