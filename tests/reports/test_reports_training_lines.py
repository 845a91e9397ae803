"""What is seen of a run: lines, the bar, the tables of scores, and the trackers."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.core.records import Event, RunResult
from trainfit.engine.observers import TrainRow, open_trackers
from trainfit.jobs.metrics import binary_metrics
from trainfit.jobs.scores import FoldScores, JobResult, summarise
from trainfit.reports import terminal, training_lines

ROW = TrainRow(
    step=30,
    total_steps=120,
    epoch=0.5,
    loss=0.4321,
    learning_rate=1e-3,
    grad_norm=0.7,
    step_seconds=2.0,
    samples_per_second=16.0,
    tokens_per_second=4096.0,
    mfu=0.314,
    memory_gib=3.25,
    wait_share=0.0,
    micro_batches=2,
    skipped=0,
)
EVENT = Event(kind="oom", step=7, seconds=1.0, text="memory ran out")


def text_of(page: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(page)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_names_that_look_like_markup_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    names = ["[/b]", "[red]", ":heart:"]
    made = terminal.table("", ["", *names])
    made.add_row(names[0], *names)
    terminal.console().print(made)
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split(), row.split()) == (names, [names[0], *names])


@pytest.mark.parametrize("width", [20, 40, 46, 80])
def test_a_narrow_terminal_shows_every_score_whole(width: int):
    made = terminal.table("Scores", ("",), ("precision of a", "macro_f1", "accuracy", "recall"))
    made.add_row("model [a]", "0.9123", "0.8123", "0.7123", "0.6123")
    made.add_row("majority class", "", "0.5123", "", "0.4123")
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(made)
    title, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.strip() == "Scores"
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    if width < 80:
        first = "model [a] precision of a 0.9123 macro_f1 0.8123 accuracy 0.7123 recall 0.6123"
        assert shown == f"{first} majority class macro_f1 0.5123 recall 0.4123"
    else:
        first = "precision of a macro_f1 accuracy recall model [a] 0.9123 0.8123 0.7123 0.6123"
        assert shown == f"{first} majority class 0.5123 0.4123"


def fold(number: int, scores: list[float]) -> FoldScores:
    metrics = binary_metrics(np.array([0, 1, 0, 1]), np.array(scores))
    return FoldScores(
        fold=number,
        overall=metrics,
        by_criterion={"A.1": metrics},
        steps=10,
        best_step=5,
        seconds=61.0,
        peak_memory_gib=None,
        events=(EVENT,),
    )


def result(folds: int) -> JobResult:
    return summarise(
        Path("runs/x"),
        "nli",
        [fold(n + 1, [0.1, 0.9, 0.2 + 0.5 * (n % 2), 0.8]) for n in range(folds)],
        {"majority_f1": 0.0, "bag_of_words_f1": 0.6125},
        cross_validated=folds > 1,
        stopped=False,
    )


def test_the_bar_has_loss_rates_mfu_memory_and_time_left():
    shown = training_lines.bar_numbers(ROW)
    for part in ("loss 0.4321", "16.0 samples/s", "4,096 tokens/s", "mfu 31.4%", "3.25 GiB"):
        assert part in shown
    assert "3 min 0 s left" in shown  # 90 steps of 2 seconds
    assert "mfu" not in training_lines.bar_numbers(replace(ROW, mfu=None))


def test_a_terminal_gets_a_bar_and_lines_above_it():
    screen = io.StringIO()
    bar = training_lines.Bar(Console(file=screen, force_terminal=True, width=200), "fold 1 of 5")
    bar.on_line("Device: cpu")
    bar.on_start(0, 120)
    bar.on_step(30)
    bar.on_log(ROW)
    bar.on_event(EVENT)
    bar.on_evaluation(30, {"f1": 0.5})
    bar.on_end(
        RunResult(run="x", status="finished", steps=1, seconds=1, metrics={}, peak_memory_gib=None)
    )
    seen = screen.getvalue()
    assert "Device: cpu" in seen
    assert "30/120" in seen
    assert "oom at step 7: memory ran out" in seen
    assert "validation f1 0.5000" in seen


def test_elsewhere_there_are_plain_lines():
    paper = io.StringIO()
    lines = training_lines.PlainLines(Console(file=paper, width=40), "fold 1 of 5")
    lines.on_log(ROW)
    lines.on_log(replace(ROW, step=40))  # too soon after the one before
    lines.on_log(replace(ROW, step=120))  # the last is always told
    said = paper.getvalue().splitlines()
    assert [line.split(":")[1].split("/")[0] for line in said] == [" step 30", " step 120"]
    assert "\x1b" not in paper.getvalue()


def test_scores_stand_beside_the_baselines():
    page = text_of(training_lines.result_page(result(3)))
    assert "Held-out scores over 3 folds" in page
    for word in (
        "fold 3",
        "mean",
        "standard deviation",
        "95% interval",
        "0.6125",
        "TF-IDF",
        "majority",
        "A.1",
    ):
        assert word in page
    assert "3 oom" in page
    assert "3 min 3 s of training, 3 folds added up" in page
    one = text_of(training_lines.result_page(result(1)))
    assert "Held-out test scores" in one
    assert "1 min 1 s of training; run folder" in one
    assert re.search(r"true class +as 0 +as 1\n0 +2 +0\n1 +0 +2\n", one)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]):
    training_lines.end(result(3), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["metrics"]["mean"]["f1"] == pytest.approx((1 + 0.8 + 1) / 3)
    assert [event["text"] for event in data["events"]][1] == "fold 2: memory ran out"


def test_a_stopped_job_says_how_to_go_on(capsys: pytest.CaptureFixture[str]):
    training_lines.end(replace(result(1), status="stopped"), as_json=False)
    assert "trainfit train nli --resume runs/x" in capsys.readouterr().out


class FakeWriter:
    made: ClassVar[list[Any]] = []

    def __init__(self, place: str) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.made.append(self)

    def add_text(self, name: str, text: str) -> None:
        self.config = text

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    [track] = open_trackers("tensorboard", tmp_path, compose("nli"))
    track({"kind": "train", "step": 4, "loss": 0.5, "note": "words"})
    [writer] = FakeWriter.made
    assert writer.scalars == [("train/loss", 0.5, 4)]
    assert "training.num_epochs: 20" in writer.config


def test_wandb_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[Any] = []

    class Session:
        def log(self, numbers: dict[str, float], step: int) -> None:
            logged.append((numbers, step))

    module = ModuleType("wandb")
    module.init = lambda **_more: Session()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    [track] = open_trackers("wandb", tmp_path, compose("nli"))
    track({"kind": "evaluation", "step": 9, "f1": 0.25})
    assert logged == [({"evaluation/f1": 0.25}, 9)]


def test_mlflow_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[Any] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return "1"

        def create_run(self, number: str, run_name: str) -> Any:
            info = ModuleType("info")
            info.run_id = "r"  # type: ignore[attr-defined]
            made = ModuleType("run")
            made.info = info  # type: ignore[attr-defined]
            return made

        def log_param(self, run: str, key: str, value: Any) -> None:
            logged.append((key, value))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            logged.append((run, name, value, step))

    module = ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    [track] = open_trackers("mlflow", tmp_path, compose("nli"))
    track({"kind": "train", "step": 1, "loss": 2.0})
    assert ("seed", 42) in logged
    assert logged[-1] == ("r", "train/loss", 2.0, 1)


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInput, match="wandb, which is not installed; pip install wandb"):
        open_trackers("wandb", tmp_path, compose("nli"))
    assert open_trackers("none", tmp_path, compose("nli")) == ()


def test_named_classes_say_what_the_scores_are_of_and_what_was_not_beaten(tmp_path: Path):
    data = {"folds": [{"metric": "macro_f1", "classes": ["ham", "spam"]}]}
    (tmp_path / "data.json").write_text(json.dumps(data))
    found = fold(1, [0.1, 0.9, 0.2, 0.8])
    baselines = {
        f"{name}_{figure}": value
        for name, value in (("majority", 0.4), ("bag_of_words", 0.9))
        for figure in ("f1", "macro_f1", "accuracy")
    }

    def page(score: float) -> str:
        overall = replace(found.overall, macro_f1=score)
        made = summarise(
            tmp_path,
            "textclass",
            [replace(found, overall=overall, by_criterion={})],
            baselines,
            cross_validated=False,
            stopped=False,
        )
        return text_of(training_lines.result_page(made))

    assert "f1, precision and recall are of the class spam" in page(0.95)
    assert re.search(r"TF-IDF regression +0.9000 +0.9000 +0.9000", page(0.95))
    assert "not beat" not in page(0.95)
    assert "not beat a baseline, TF-IDF regression: macro_f1 0.6000 against 0.9000" in page(0.6)
