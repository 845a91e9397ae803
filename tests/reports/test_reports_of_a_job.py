"""A real job, from its data to its page."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from job_tiny import SECRET, be_quick, nli_words
from trainfit.cli.main import run
from trainfit.core.records import GpuState, HardwareProfile, Receipt, RunResult
from trainfit.engine import observers
from trainfit.hardware.nvml import open_sampler
from trainfit.jobs.scores import FoldScores, JobResult


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    import io
    from contextlib import redirect_stdout

    tmp = tmp_path_factory.mktemp("job")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        be_quick(patch)
        words = nli_words(tmp, "cv.folds=2", "training.num_epochs=1", "training.logging_steps=1")
        assert run(["train", "nli", *words]) == 0
    torch.set_num_threads(threads)
    [folder] = (tmp / "runs").iterdir()
    return folder, said.getvalue()


def test_training_ends_with_the_path_of_its_page_and_how_to_use_it(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    folder, said = trained
    *_, page, use = said.splitlines()
    assert page == f"Report: {folder / 'report.html'}"
    words = shlex.split(use.removeprefix("Predict: trainfit "))
    assert run(words) == 0
    assert len(json.loads(capsys.readouterr().out)) == 9  # a row for each criterion
    page = (folder / "report.html").read_text()
    assert "fold 2" in page
    assert "A.9" in page


def test_no_word_of_a_post_is_in_any_format(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    folder, _ = trained
    for form in ("html", "markdown", "json"):
        target = folder.parent / f"page.{form}"
        assert run(["report", str(folder), "--format", form, "--output", str(target)]) == 0
        assert SECRET not in target.read_text()
    assert run(["watch", str(folder), "--json"]) == 0
    assert SECRET not in capsys.readouterr().out


def test_the_scores_are_those_of_the_run(trained: tuple[Path, str], capsys):
    folder, _ = trained
    assert run(["report", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    results = JobResult.load(folder / "results.json")
    [section] = [s for s in data["chapters"][0]["sections"] if s["id"] == "scores"]
    figures = {block["id"]: block for block in section["blocks"] if "id" in block}
    rows = {row["label"]: row["value"] for row in figures["f1-folds"]["rows"]}
    for number, fold in enumerate(results.metrics["folds"], 1):
        assert rows[f"fold {number}"] == pytest.approx(fold["f1"])
    for row in figures["f1-criteria"]["rows"]:
        assert row["value"] == pytest.approx(results.by_criterion[row["label"]].f1)
    assert figures["confusion"]["counts"] == results.metrics["confusion"]
    hardware = HardwareProfile.load(folder / "hardware.json")
    assert hardware.cpu.name in json.dumps(data, ensure_ascii=False)


def test_a_page_that_cannot_be_written_spoils_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from trainfit.core.errors import RunFailed
    from trainfit.reports import run_report

    def fail(*_arguments: object) -> Path:
        raise RunFailed("cannot write report.html (No space left on device)", "free some")

    be_quick(monkeypatch)
    monkeypatch.setattr(run_report, "write", fail)
    words = nli_words(tmp_path, "training.max_steps=1")
    assert run(["train", "nli", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "finished"
    assert "note: no report: cannot write" in captured.err


def test_results_show_themselves_in_a_notebook(trained: tuple[Path, str]):
    folder, _ = trained
    for kind, path in (
        (HardwareProfile, folder / "hardware.json"),
        (JobResult, folder / "results.json"),
        (FoldScores, folder / "fold-1" / "scores.json"),
        (RunResult, folder / "fold-1" / "result.json"),
    ):
        assert kind.load(path)._repr_html_().startswith("<table>")
    assert Receipt(run="x", items=())._repr_html_().startswith("<table>")
    assert GpuState()._repr_html_()


# ── GPU samples ───────────────────────────────────────────────────────────────────────────────


def test_samples_are_written_beside_the_log_and_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(observers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "gpus.jsonl"
    track = observers.make_tracker(path, lambda: [{"index": 0, "temperature_c": 60}])
    for step, seconds in ((1, 0.0), (2, 0.4), (3, 1.2), (4, 1.3), (5, 9.0)):
        now[0] = seconds
        track({"kind": "train", "step": step})
        track({"kind": "evaluation", "step": step})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 5]
    assert rows[0]["gpus"] == [{"index": 0, "temperature_c": 60}]


def test_without_a_gpu_nothing_is_asked(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert observers.gpu_trackers(tmp_path) == ()


class Driver:
    """A driver that knows one GPU, and of it no power."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetUtilizationRates(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        return 66

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        raise self.NVMLError

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=2 * 2**30, used=2**30)


def test_a_sample_has_what_the_driver_tells():
    [sample] = open_sampler(Driver, ["GPU-0", "GPU-1"])()
    assert sample == {
        "index": 1,
        "utilisation_percent": 97,
        "temperature_c": 66,
        "power_w": None,
        "memory_used_gib": 1.0,
    }


def test_a_driver_that_does_not_start_gives_no_sample():
    class Broken(Driver):
        def nvmlInit(self) -> None:
            raise self.NVMLError

    def missing() -> None:
        raise ImportError

    assert open_sampler(Broken, ["GPU-1"])() == []
    assert open_sampler(missing, ["GPU-1"])() == []
