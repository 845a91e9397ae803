"""Job files are complete: as they were looked over (golden), and on a real Slurm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm_here import Slurm, lacking

from job_tiny import be_quick, nli_words
from trainfit.cli.launch import job_file
from trainfit.cli.main import run

GOLDEN = Path(__file__).with_name("golden")
TRAIN = ("train", "gpt", "data.data_dir=tokens", "training.max_steps=1000")
JOBS = {
    "slurm": {"kind": "slurm", "words": TRAIN, "nodes": 2, "each": 8, "partition": "gpu"},
    "slurm_array": {
        "kind": "slurm",
        "words": ("hpo", "nli", "data.data_dir=my posts", "hpo.storage=journal:study.journal"),
        "array": 16,
    },
    "sky": {"kind": "sky", "words": TRAIN, "nodes": 2, "each": 8, "accelerator": "H100"},
    "kubeflow": {"kind": "kubeflow", "words": TRAIN, "nodes": 2, "each": 8},
    "docker": {"kind": "docker", "words": TRAIN, "each": 2},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_is_the_golden_one(name: str) -> None:
    common = {"nodes": 1, "each": 1, "cpus": 56, "time": "04:30:00", "file": f"job.{name}"}
    common |= {"array": None, "partition": None, "accelerator": ""}
    common |= {"image": "trainfit", "bucket": "trainfit-runs"}
    text = job_file(**common | JOBS[name])  # type: ignore[arg-type]
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    if JOBS[name]["kind"] in ("sky", "kubeflow"):
        assert isinstance(yaml.safe_load(text), dict)
    else:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "train", "nli", "sede=3"], "unknown key sede"),
        (["slurm", "predict", "nli"], "write train or hpo"),
        (["slurm", "--gpus", "8x", "train", "nli"], "machines x GPUs such as 2x8"),
        (["slurm", "--array", "4", "train", "nli"], "--array is for workers of a study"),
        (["sky", "--gpus", "8", "train", "nli"], "has to know which GPU"),
        (["sky", "--gpus", "0", "--array", "4", "hpo", "nli"], "workers need a database"),
        (["docker", "--gpus", "2x8", "train", "nli"], "on one machine"),
        (["kubeflow", "hpo", "nli"], "use --array N"),
        (["docker", "--submit", "train", "nli"], "--submit needs Slurm"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["launch", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_workers_of_an_array_share_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["launch", "slurm", "--array", "16", "hpo", "nli"]) == 0
    text = (tmp_path / "trainfit-nli.sbatch").read_text()
    assert "#SBATCH --array=1-16" in text
    assert "hpo.storage=journal:trainfit-nli.journal" in text


def test_resume_auto_begins_and_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainfit.cli.train import _left_run
    from trainfit.jobs.configuration import configure
    from trainfit.runs import run_folder

    be_quick(monkeypatch)
    composed = configure("nli", nli_words(tmp_path))
    damaged = Path(composed.config.runs_dir, "damaged", "config.json")
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\xff\xfe")
    assert _left_run(composed) is None
    root = Path(composed.config.runs_dir)
    left, ended, other = (
        run_folder.create(root, "nli", config=config, plan=None)
        for config in (composed.written(), composed.written(), {"task": "nli"})
    )
    for folder in (left, ended, other):
        (folder / "data.json").write_text("{}")
    (ended / "results.json").write_text("{}")
    assert _left_run(composed) == ended  # it lacks its report
    (ended / "report.html").touch()
    assert _left_run(composed) == left


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if missing := lacking():
        pytest.skip(f"not installed: {', '.join(missing)}")
    (tmp_path / "slurm").mkdir()
    made = Slurm(tmp_path / "slurm")
    try:
        made.start()
        yield made
    finally:
        made.stop()


def exported(root: Path) -> dict[str, bytes]:
    [folder] = root.glob("*/export")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.soak
def test_a_job_on_slurm_is_preempted_requeued_and_ends_with_the_same_bits(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough to be under way when the signal comes, also on quick cores.
    more = ("training.num_epochs=60", "training.eval_steps=100", "tune=off")
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def submit(where: str) -> str:
        words = [w for w in nli_words(tmp_path, *more) if not w.startswith("runs_dir")]
        job = ["train", "nli", *words, f"runs_dir={tmp_path / where}"]
        options = ["--gpus", "0", "--cpus", "1", "--file", f"{where}.sbatch", "--submit"]
        assert run(["launch", "slurm", *options, *job]) == 0
        return slurm.run("squeue", "-h", "-o", "%i").split()[-1]

    def ended(job: str, where: str) -> None:
        until = time.monotonic() + 100
        while not list((tmp_path / where).glob("*/results.json")):
            assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job)
            time.sleep(0.5)
        while "COMPLETED" not in slurm.run("scontrol", "show", "job", job):
            assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job)
            time.sleep(0.5)

    ended(submit("whole"), "whole")
    job = submit("parts")
    until = time.monotonic() + 90
    while not list((tmp_path / "parts").glob("*/metrics.jsonl")):
        assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job)
        time.sleep(0.1)
    time.sleep(1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as at the end of an allocation
    while "Restarts=1" not in slurm.run("scontrol", "show", "job", job):
        assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job)
        time.sleep(0.5)
    ended(job, "parts")
    [log] = (tmp_path / "parts").glob("*/train.log")
    assert "from step-" in log.read_text()
    assert exported(tmp_path / "parts") == exported(tmp_path / "whole")
