"""--gpus starts a command on several ranks, or joins those that a launcher has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from job_tiny import be_quick, nli_words
from trainfit.cli import ranks
from trainfit.cli.main import run
from trainfit.cli.ranks import AskedRanks, choose, first_host, slurm_rank, whole_folds, with_slurm
from trainfit.conf import compose
from trainfit.core.errors import BadInput, RunFailed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "two"], "give all, a number, or GPUs such as 0,2"),
        (["--gpus", "0"], "give all, a number"),
        (["--gpus", "2", "--nodes", "2"], "add --gpus all --rdzv HOST:PORT"),
        (["--gpus", "2", "--nodes", "2", "--rdzv", "here"], "give HOST:PORT"),
        (["--gpus", "2", "sede=3"], "unknown key sede for nli"),
    ],
)
def test_bad_words_are_one_line_before_any_rank_starts(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks, "_launch", lambda *_: pytest.fail("ranks were started"))
    assert run(["train", "nli", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("gpus", "there", "visible", "chosen"),
    [
        ("all", 4, "", ("0", "1", "2", "3")),
        ("2", 4, "", ("0", "1")),
        ("0,2", 4, "", ("0", "2")),
        ("1,", 4, "", ("1",)),
        ("all", 2, "5,GPU-7", ("5", "GPU-7")),
        ("1,0", 2, "5,GPU-7", ("GPU-7", "5")),
        ("all", 0, "", 1),
        ("3", 0, "", 3),
        ("0,2", 0, "", 2),
    ],
)
def test_the_gpus_that_are_meant(gpus: str, there: int, visible: str, chosen: Any) -> None:
    AskedRanks(gpus=gpus)
    found, note = choose(gpus, there, {"CUDA_VISIBLE_DEVICES": visible})
    assert found == chosen
    assert bool(note) == (there == 0)


@pytest.mark.parametrize("gpus", ["3", "0,2", "1,1"])
def test_gpus_that_are_not_there_are_refused(gpus: str) -> None:
    with pytest.raises(BadInput, match="this machine has 2 GPUs"):
        choose(gpus, 2, {})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a7", "a7"), ("gpu[03-06,9],login", "gpu03"), ("n[1-2].site", "n1.site"), ("b,c", "b")],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_task_of_srun_is_a_rank_and_a_batch_script_is_none() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "41", "SLURM_LOCALID": "0"}
    assert slurm_rank(script) == {}
    step = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    assert slurm_rank(script | step | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20041",
    }
    assert with_slurm(AskedRanks(gpus="all"), script | step).nodes == 1
    each = script | step | {"SLURM_STEP_NUM_TASKS": "2"}
    assert with_slurm(AskedRanks(gpus="all"), each) == AskedRanks(
        gpus="all", nodes=2, rdzv="n1:20041"
    )


@pytest.mark.parametrize(
    ("folds", "gpus", "words", "whole"),
    [
        (5, 2, (), True),
        (5, 5, (), True),
        (4, 4, (), True),
        (5, 4, (), False),
        (5, 8, (), False),
        (5, 1, (), False),
        (4, 4, ("optimization.sharding=fsdp",), False),
    ],
)
def test_whole_folds_go_to_a_gpu_each_where_few_of_them_wait(
    folds: int, gpus: int, words: tuple[str, ...], whole: bool
) -> None:
    config = compose("nli", [f"cv.folds={folds}", *words]).config
    assert bool(whole_folds(config, gpus)) == whole
    assert whole_folds(compose("gpt", []).config, gpus) == ""


def test_what_ranks_ended_with_is_the_exit_code_of_the_command() -> None:
    def ended(*codes: int) -> Any:
        failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
        return SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))

    assert ranks._exit_code(ended(2, -15)) == 2
    assert ranks._exit_code(ended(-15, 2)) == 2
    assert ranks._exit_code(ended(130, 130)) == 130
    assert ranks._exit_code(ended(1, -15)) == 1
    with pytest.raises(RunFailed, match="rank 0 was ended by SIGKILL"):
        ranks._exit_code(ended(-9, 1))


def losses(root: Path) -> list[float]:
    [path] = root.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


ALIKE = (
    "training.num_epochs=1",
    "training.effective_batch_size=16",
    "training.logging_steps=1",
    *(f"model.{name}_dropout=0.0" for name in ("head", "attention", "feed_forward")),
)


def words_of(tmp: Path, name: str) -> list[str]:
    words = [word for word in nli_words(tmp, *ALIKE) if not word.startswith("runs_dir")]
    return ["train", "nli", *words, f"runs_dir={tmp / name}"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainfit", *words]


@pytest.mark.soak
@pytest.mark.parametrize("count", ["2", "4"])
def test_ranks_of_a_cpu_have_the_losses_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    be_quick(monkeypatch)
    assert run(words_of(tmp_path, "one")) == 0
    done = subprocess.run(
        command(*words_of(tmp_path, "more"), "--gpus", count, "--json"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"there is no GPU here: {count} ranks over gloo on the CPU" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"
    assert losses(tmp_path / "more") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.soak
def test_a_signal_to_the_command_saves_a_checkpoint_on_all_ranks(tmp_path: Path) -> None:
    words = [*words_of(tmp_path, "runs"), "training.num_epochs=500", "--gpus", "2"]
    process = subprocess.Popen(
        command(*[word for word in words if word != "training.num_epochs=1"]),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and not any((tmp_path / "runs").glob("*/metrics.jsonl")):
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert any((tmp_path / "runs").glob("*/checkpoints/step-*"))
    assert "Traceback" not in said
