"""The report of runs: what is in it, in every format, and what never is."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import LADDER, SETUP, write_end, write_run

from trainfit.cli.main import run as cli
from trainfit.core.plan_records import Plan
from trainfit.reports.run_report import Report, place, report
from trainfit.runs.opening import DataSetup
from trainfit.runs.run_folder import Journal

Make = Callable[..., Plan]


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory: pytest.TempPathFactory, make_plan: Make) -> Path:
    plan = make_plan(gpu="rtx-4090")
    return write_run(tmp_path_factory.mktemp("runs") / "nli-20261115-080000-1", plan)


@pytest.fixture(scope="module")
def made(gpu_run: Path) -> Report:
    return report(gpu_run)


def sections(made: Report, chapter: int = 0) -> dict[str, Any]:
    data = json.loads(made.to_json())
    return {s["id"]: s["blocks"] for s in data["chapters"][chapter]["sections"]}


def figure(made: Report, name: str, chapter: int = 0) -> dict[str, Any]:
    blocks = [b for blocks in sections(made, chapter).values() for b in blocks]
    [found] = [block for block in blocks if block.get("id") == name]
    return found


def texts(blocks: list[dict[str, Any]]) -> str:
    return json.dumps(blocks, ensure_ascii=False)


def test_every_part_is_there(made: Report):
    found = sections(made)
    expected = "scores training speed promise receipt ladder plan events setting"
    assert list(found) == expected.split()
    ids = {block["id"] for blocks in found.values() for block in blocks if "id" in block}
    assert ids >= {
        *("loss", "validation-loss", "validation-f1", "learning-rate", "grad-norm"),
        *("tokens-per-second", "samples-per-second", "mfu", "memory-gib", "wait-share"),
        *("utilisation-percent", "temperature-c", "memory", "roc", "precision-recall"),
        *("f1-criteria", "ladder"),
    }


def test_the_json_has_the_numbers_of_the_log(made: Report, gpu_run: Path):
    rows = [json.loads(line) for line in (gpu_run / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    [series] = figure(made, "learning-rate")["series"]
    assert series["x"] == [row["step"] for row in train]
    assert series["y"] == [row["learning_rate"] for row in train]
    [series] = figure(made, "loss")["series"]
    assert series["y"][409] is None  # not finite: a gap, not a zero
    [series] = figure(made, "grad-norm")["series"]
    assert max(series["y"]) == 97.5
    [first, second] = figure(made, "utilisation-percent")["series"]
    assert (first["name"], first["y"][0], second["y"][0]) == ("GPU 0", 0.96, 0.93)


def test_events_are_on_every_curve_and_in_the_table(made: Report):
    for name in ("loss", "mfu", "memory-gib", "temperature-c"):
        marks = figure(made, name)["marks"]
        assert [(mark["x"], mark["event"]) for mark in marks] == [(200, "oom"), (410, "skipped")]
    [table] = sections(made)["events"]
    assert [row[1] for row in table["rows"]] == [200, 410]
    assert "cut into 4 micro-batches" in texts([table])


def test_a_promise_stands_beside_what_was_measured(made: Report, gpu_run: Path, make_plan: Make):
    table = sections(made)["promise"][0]
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["peak memory, allocated"] == ["17.00 GiB", "± 1.5%", "17.00 GiB", "+0.0%"]
    log = (gpu_run / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("tokens_per_second") for line in log]
    median = float(np.median([rate for rate in rates if rate is not None][1:]))
    assert rows["tokens/s"][2] == f"{median:,.0f}"
    time = make_plan().time
    assert time is not None
    assert rows["tokens/s"][3] == f"{median / time.tokens_per_second - 1:+.1%}"
    levels = {r["label"]: r["y"] for r in figure(made, "memory-gib")["references"]}
    assert levels == {"predicted peak": 17.0, "capacity": 23.5}
    assert figure(made, "memory")["measured"] == 17.0


def test_the_plan_has_a_reason_for_each_setting(made: Report):
    [table, *_] = sections(made)["plan"]
    rows = {row[0]: row[1:] for row in table["rows"]}
    why, instead = (
        "the GPU has it in its matrix units",
        "fp16: needs loss scaling; fp32: half as fast",
    )
    assert rows["precision"] == ["bf16", why, instead]
    assert rows["compile"][0] == "yes"


def test_what_the_receipt_found_wanting_stands_first(made: Report):
    remark, table = sections(made)["receipt"]
    assert remark["tone"] == "warning"
    assert table["rows"][0][:2] == ["flash attention", "NOT ACTIVE"]
    assert table["rows"][0][5] == "leave out the mask"


def test_the_ladder_has_its_intervals_and_speed_ups(made: Report):
    rows = figure(made, "ladder")["rows"]
    assert [row["label"] for row in rows] == [step.name for step in LADDER.steps]
    assert (rows[1]["low"], rows[1]["value"], rows[1]["high"]) == (49.9, 51.0, 52.2)
    assert rows[4]["value"] is None
    table = sections(made)["ladder"][1]
    assert table["rows"][3][2] == "6.62×"
    assert table["rows"][4][5] == "no convolution"


def test_a_job_of_ones_own_is_shown_by_its_own_metric(tmp_path: Path, make_plan: Make):
    own = {"metric": "recall_at_1", "metrics": {"recall_at_1": 0.75, "loss": 0.5}}
    folders = [write_run(tmp_path / name, make_plan(), results=own) for name in ("a", "b")]
    made = report(*folders)
    table = sections(made, 1)["scores"][0]
    assert table["columns"] == ["", "recall at 1", "loss"]
    assert table["rows"][0] == ["model", "0.7500", "0.5000"]
    assert made.chapters[1].headlines[0].label == "recall_at_1"
    assert figure(made, "compared-recall_at_1")["rows"][1]["value"] == 0.75


def test_three_classes_are_each_against_the_rest(tmp_path: Path, make_plan: Make):
    folder = write_run(tmp_path / "textclass-1", make_plan(), classes=("red", "green", "blue"))
    made = report(folder)
    assert {line["name"] for line in figure(made, "roc")["series"]} == {"red", "green", "blue"}
    assert figure(made, "f1-folds")["title"] == "Macro F1"


def test_a_run_that_died_is_reported_by_its_log(tmp_path: Path, make_plan: Make):
    folder = write_run(tmp_path / "nli-1", make_plan(), finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 60')
    (folder / "plan.json").write_text('{"fits": tr')
    made = report(folder)
    assert made.chapters[0].status == "unfinished"
    assert [mark["event"] for mark in figure(made, "loss")["marks"]] == ["oom", "skipped"]
    assert "plan.json is left out" in texts(sections(made)["setting"])
    assert "<html" in made.html()


def test_an_empty_run_is_a_page_too(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"id": "x"}')
    made = report(tmp_path)
    assert "Nothing was logged" in made.html()
    assert "Nothing was logged" in made.markdown()


def test_a_run_that_goes_on_after_a_stop_is_not_ended(tmp_path: Path, make_plan: Make):
    import os

    folder = write_run(tmp_path / "nli-1", make_plan(), finished=False)
    write_end(folder, 600, (), {})
    (folder / "results.json").unlink()
    assert report(folder).chapters[0].status == "finished"
    later = (folder / "result.json").stat().st_mtime + 5
    os.utime(folder / "metrics.jsonl", (later, later))
    assert report(folder).chapters[0].status == "unfinished"


def test_on_a_cpu_the_page_says_why_there_is_no_mfu_and_no_temperature(
    tmp_path: Path, make_plan: Make
):
    folder = write_run(tmp_path / "nli-1", make_plan(gpu=None))
    (folder / "gpus.jsonl").unlink()
    log = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'"mfu": [\d.]+, ', "", log))
    found = texts(sections(report(folder))["speed"])
    assert "No MFU: there is no published peak for this device" in found
    assert "No GPU utilisation or temperature" in found


def test_pretraining_has_its_loss_beside_the_unigram_entropy(tmp_path: Path, make_plan: Make):
    results = {
        "task": "gpt",
        "metrics": {},
        "val_loss": 3.2,
        "unigram_entropy": 6.5,
        "spent": {"computing": 90.0, "waiting": 1.0},
    }
    folder = write_run(tmp_path / "gpt-1", make_plan(gpu="a100-sxm4-80gb"), results=results)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "task": "gpt"}))
    (folder / "predictions.csv").unlink()
    made = report(folder)
    [level] = figure(made, "loss")["references"]
    assert level == {"y": 6.5, "label": "unigram entropy"}
    assert made.chapters[0].headlines[0].value == "3.2000"
    assert [r["y"] for r in figure(made, "mfu")["references"]] == [0.25, 0.35]
    assert [part["label"] for part in figure(made, "spent")["parts"]] == ["computing", "waiting"]


def test_several_runs_are_compared(tmp_path: Path, gpu_run: Path, make_plan: Make):
    other = write_run(tmp_path / "nli-2", make_plan(), seed=1, learning_rate=1e-4)
    made = report(gpu_run, other)
    assert [chapter.id for chapter in made.chapters] == ["comparison", "run-1", "run-2"]
    names = [gpu_run.name, "nli-2"]
    assert [line["name"] for line in figure(made, "compared-train-loss")["series"]] == names
    [table] = sections(made)["differences"]
    assert table["columns"] == ["key", *names]
    assert table["rows"] == [["training.learning_rate", "2e-5", "0.0001"]]
    assert len(made.html()) < 10e6


STUDY = {
    "study": "nli-lr",
    "metric": "f1",
    "direction": "maximize",
    "history": [
        {"number": 0, "state": "complete", "value": 0.5, "best": 0.5},
        {"number": 1, "state": "pruned", "value": None, "best": 0.5},
        {"number": 2, "state": "complete", "value": 0.8, "best": 0.8},
        {"number": 3, "state": "complete", "value": 0.7, "best": 0.8},
    ],
    "importance": {"training.learning_rate": 0.7, "model.pooling": 0.3},
    "parallel": [
        {"number": 0, "value": 0.5, "training.learning_rate": 5e-6, "model.pooling": "mean"},
        {"number": 2, "value": 0.8, "training.learning_rate": 3e-5, "model.pooling": "first"},
        {"number": 3, "value": 0.7, "training.learning_rate": 1e-5, "model.pooling": "mean"},
    ],
    "curves": {"0": {"1": 0.3, "2": 0.5}, "2": {"1": 0.6, "2": 0.8}},
}


def write_study(folder: Path) -> Path:
    folder.mkdir()
    about = {"study": "nli-lr", "task": "nli", "folds": 3, "metric": "f1"}
    (folder / "study.json").write_text(json.dumps(about))
    (folder / "figures.json").write_text(json.dumps(STUDY))
    result = {"best": {"value": 0.8, "test": {"f1": 0.77}, "params": {}}, "seconds": 60.0}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_study_has_history_importance_and_parallel_coordinates(tmp_path: Path):
    made = report(write_study(tmp_path / "nli-lr"))
    trials, best = figure(made, "history")["series"]
    assert (trials["x"], trials["y"]) == ([0, 2, 3], [0.5, 0.8, 0.7])
    assert best["y"] == [0.5, 0.8, 0.8]
    assert [row["value"] for row in figure(made, "importance")["rows"]] == [0.7, 0.3]
    parallel = figure(made, "parallel")
    assert [axis["name"] for axis in parallel["axes"]] == ["learning_rate", "pooling", "f1"]
    assert parallel["places"][:2] == [[0, 1, 0], [1, 0, 1]]
    assert parallel["places"][2] == pytest.approx([0.2, 1, 2 / 3])  # (1e-5 - 5e-6) / 2.5e-5
    assert [h.value for h in made.chapters[0].headlines[:2]] == ["0.8000", "0.7700"]
    assert "Parallel coordinates" in made.html()


def test_a_study_under_way_says_so(tmp_path: Path):
    folder = write_study(tmp_path / "nli-lr")
    for name in ("figures", "result"):
        (folder / f"{name}.json").unlink()
    made = report(folder)
    assert made.chapters[0].status == "unfinished"
    assert "has not ended yet" in made.markdown()


# ── text that is not ours ─────────────────────────────────────────────────────────────────────

EVIL = "</script><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_names_and_texts_are_escaped_everywhere(tmp_path: Path, make_plan: Make):
    plan = make_plan()
    plan = replace(plan, reasons=(replace(plan.reasons[0], why=EVIL),), advice=(EVIL,))
    folder = write_run(tmp_path / "x<b>y", plan, classes=(EVIL, "b"), name=EVIL)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events.replace("cut into", json.dumps(EVIL)[1:-1]))
    (folder / "result.json").unlink()
    made = report(folder)
    tags = Tags(made.html())
    assert not tags.found & {"img", "b>y"}
    assert "onerror" not in tags.attributes
    assert made.html().count("</script>") == 2
    assert "<img" not in made.markdown().replace("\\<", "")
    assert EVIL in json.loads(made.to_json())["chapters"][0]["subtitle"]


def test_nothing_is_loaded_from_elsewhere(made: Report):
    page = made.html()
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


# ── the command ───────────────────────────────────────────────────────────────────────────────


def test_the_command_prints_the_path(
    gpu_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "deep" / "page.html"
    assert cli(["report", str(gpu_run), "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert target.read_text().startswith("<!doctype html>")
    assert cli(["report", str(gpu_run)]) == 0
    assert capsys.readouterr().out == f"{gpu_run / 'report.html'}\n"


def test_a_comparison_replaces_no_page_of_a_run(
    gpu_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    others = [write_run(tmp_path / name) for name in ("nli-2", "nli-3")]
    assert cli(["report", str(gpu_run)]) == 0
    alone = (gpu_run / "report.html").read_text()
    capsys.readouterr()
    for other in others:
        assert cli(["report", str(gpu_run), str(other)]) == 0
        assert capsys.readouterr().out == f"{gpu_run / f'report-with-{other.name}.html'}\n"
    assert (gpu_run / "report.html").read_text() == alone
    many = place(gpu_run, *others * 20)
    assert len(many.name) < 60
    assert many != place(gpu_run, *others * 21)


@pytest.mark.parametrize("named", [None, "posts"])
def test_the_title_says_where_data_is_synthetic(named: str | None, tmp_path: Path):
    folder = write_run(tmp_path / "nli-1")
    written = json.loads((folder / "config.json").read_text())
    written["config"]["data"] = {"data_dir": named}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "environment.json").write_text('{"started": "2026-11-17 10:44:49"}')
    made = report(folder)
    assert made.title == ("nli-1, on synthetic data" if named is None else "nli-1")
    assert made.chapters[0].subtitle.endswith("2026-11-17 10:44")
    assert "2026-11-17 10:44:49" in made.html()
    # A run of this version says it itself.
    setup = replace(SETUP, data=DataSetup(train=8, validation=1, synthetic=True))
    with closing(Journal(folder)) as journal:
        list(journal.setup(setup, 0))
    assert report(folder).title == "nli-1, on synthetic data"


def test_the_baselines_stand_beside_the_score(tmp_path: Path):
    head = report(write_run(tmp_path / "nli-1")).chapters[0].headlines[0]
    assert (head.label, head.value) == ("F1", "0.8500")
    assert head.note == "majority class 0.0000; TF-IDF regression 0.6200"


def test_named_classes_have_macro_f1_first_and_say_whose_f1_it_is(tmp_path: Path):
    folder = write_run(tmp_path / "textclass-1")
    data = {"folds": [{"classes": ["ham", "spam"], "metric": "macro_f1"}]}
    (folder / "data.json").write_text(json.dumps(data))
    results = json.loads((folder / "results.json").read_text())
    results["metrics"] |= {"macro_f1": 0.8, "confusion": [[8, 2], [1, 9]]}
    results["baselines"] |= {"bag_of_words_macro_f1": 0.7, "bag_of_words_accuracy": 0.8}
    (folder / "results.json").write_text(json.dumps(results))
    made = report(folder)
    head = made.chapters[0].headlines[0]
    assert (head.label, head.note) == ("macro F1", "TF-IDF regression 0.7000")
    page = made.html()
    assert "are of the class spam" in page


def test_formats_by_option_and_by_ending(
    gpu_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli(["report", str(gpu_run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["chapters"][0]["title"] == gpu_run.name
    assert cli(["report", str(gpu_run), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("# nli-20261115-080000-1 (finished)")
    assert cli(["report", str(gpu_run), "--output", str(tmp_path / "a.md")]) == 0
    assert (tmp_path / "a.md").read_text().startswith("# nli")
    assert cli(["report", str(gpu_run), "--format", "json", "--output", str(tmp_path / "b")]) == 0
    assert json.loads((tmp_path / "b").read_text())


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli(["report"]) == 2


def test_a_place_that_cannot_be_written_is_refused_in_one_line(
    gpu_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "page.html"
    assert cli(["report", str(gpu_run), "--output", str(target)]) == 2
    assert str(target) in capsys.readouterr().err


def test_a_notebook_shows_the_page_in_a_frame(made: Report):
    shown = made._repr_html_()
    assert Tags(shown).found == {"iframe"}


@pytest.mark.soak
def test_a_hundred_thousand_steps_make_a_small_page(long_page: Path):
    assert long_page.stat().st_size < 2e6
