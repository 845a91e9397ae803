"""`trainfit init`, and the file it writes in use."""

import json
import re
from pathlib import Path

import pytest
import yaml

from trainfit.cli.main import run
from trainfit.conf import SCHEMAS, compose, keys
from trainfit.conf.starting import field_texts, with_file


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def config_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert run(["config", *words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    return {key: one["value"] for key, one in values.items()}


def uncommented(text: str) -> str:
    """The file with every key set, as somebody would do who takes each # away."""
    return re.sub(r"(?m)^(\s*)#(\w+: )", r"\1\2", text)


@pytest.mark.parametrize("task", SCHEMAS)
def test_as_it_is_the_file_changes_nothing(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mine.yaml"
    assert run(["init", task, "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert config_of(capsys, task, "--config", str(path)) == config_of(capsys, task)
    assert set(compose(task, with_file(task, path, [])).origins.values()) == {"default"}


@pytest.mark.parametrize("task", SCHEMAS)
def test_with_every_line_taken_it_says_what_holds_anyway(task: str, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    assert run(["init", task, "--output", str(path)]) == 0
    text = uncommented(path.read_text("utf-8"))
    composed = compose(task, with_file(task, write(tmp_path / "all.yaml", text), []))
    assert composed.values() == compose(task).values()
    assert set(composed.origins.values()) == {"override"}
    listed = yaml.safe_load(text)
    assert {key.split(".")[0] for key in keys(task)} <= set(listed)


@pytest.mark.parametrize("task", SCHEMAS)
def test_every_docstring_of_the_schema_stands_in_it(task: str, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    assert run(["init", task, "--output", str(path)]) == 0
    words = " ".join(re.sub(r"(?m)^\s*#\s?", "", path.read_text("utf-8")).split())
    schema = SCHEMAS[task]
    sections = [schema, *(type(part) for part in vars_of(compose(task).config))]
    texts = [text for section in sections for text in field_texts(section).values()]
    assert len(texts) > 15
    assert "The memory knob" in words  # a field that gpt's section inherits
    for text in texts:
        assert " ".join(text.split()) in words
    comments = [line for line in path.read_text("utf-8").splitlines() if str(path) not in line]
    assert max(len(line) for line in comments) <= 100


def vars_of(config: object) -> list[object]:
    names = type(config).__dataclass_fields__  # type: ignore[attr-defined]
    values = [getattr(config, name) for name in names]
    return [value for value in values if hasattr(value, "__dataclass_fields__")]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "mine.yaml", "seed: 7\n")
    assert run(["init", "nli", "--output", str(path)]) == 2
    assert path.read_text("utf-8") == "seed: 7\n"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_it_is_named_after_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    assert capsys.readouterr().out == "nli.yaml\n"
    assert run(["init", "gtp"]) == 2
    assert "did you mean gpt?" in capsys.readouterr().err


def test_an_unwritable_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "file", "")
    assert run(["init", "nli", "--output", str(tmp_path / "file" / "x.yaml")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ── --config FILE ─────────────────────────────────────────────────────────────────────────────

MINE = """\
hardware: t4
device:
  mixed_precision: off
training:
  batch_size: 6
  learning_rate: 3e-5
  max_steps: null
model:
  name: "bert-base"
optimization:
"""


def test_a_file_counts_more_than_presets_and_less_than_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write(tmp_path / "mine.yaml", MINE)
    values = config_of(capsys, "nli", "--config", str(path))
    assert values["training.batch_size"] == 6
    assert values["training.learning_rate"] == 3e-5
    assert values["device.mixed_precision"] == "off"  # which YAML takes for false
    assert values["model.use_gradient_checkpointing"] is True  # of the preset
    words = ["hardware=gpu_4090", "batch_size=20"]
    values = config_of(capsys, "nli", *words, "--config", str(path))
    assert values["training.batch_size"] == 20
    assert values["model.name"] == "bert-base"
    assert values["optimization.compile"] is True  # of the 4090's preset


def test_it_is_what_training_goes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "mine.yaml", "training:\n  batch_size: 3\n")
    taken = []
    monkeypatch.setattr(
        "trainfit.cli.train._dry_run", lambda job, composed, _: taken.append(composed)
    )
    assert run(["train", "nli", "--dry-run", "--config", str(path)]) == 0
    assert taken[0].config.training.batch_size == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training:\n  batchsize: 8\n", "did you mean training.batch_size?"),
        ("trainin:\n  batch_size: 8\n", "unknown key trainin.batch_size"),
        ("training:\n  batch_size: many\n", "training.batch_size is"),
        ("hardware: tt4\n", "did you mean t4?"),
        ("training: [1, 2\n", "line"),
        ("- 1\n- 2\n", "mapping"),
        ("seed: 1\nseed: 2\n", "there twice"),
        (None, "No such file"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    for command in (["config", "nli"], ["train", "nli", "--dry-run"], ["plan", "nli"]):
        assert run([*command, "--config", str(path)]) == 2
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1
        assert said in error


def test_several_mistakes_are_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "mine.yaml", "training:\n  batchsize: 8\n  leraning_rate: 1\n")
    assert run(["config", "nli", "--config", str(path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert all(str(path) in line for line in lines)
