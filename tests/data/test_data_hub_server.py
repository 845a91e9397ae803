"""Data sets of a hub on this machine, read by the real library in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from datasets import ClassLabel, Dataset, Features, Value, disable_progress_bars

from dataset_server import dataset_hub
from hub_server import environment

CARD = """---
configs:
- config_name: plain
  default: true
  data_files:
  - {split: train, path: plain/train-*.parquet}
  - {split: test, path: plain/test.parquet}
- config_name: short
  data_files:
  - {split: extra, path: short.parquet}
---
"""
SIZES = {"plain/train-0": 60, "plain/train-1": 61, "plain/test": 40, "short": 50}
SLOW = pytest.mark.soak
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
SETTLED = """
import json, sys
from pathlib import Path
from trainfit.data.row_files import read_rows
from trainfit.jobs.configuration import configure

for words in json.loads(sys.argv[1]):
    data = configure("textclass", [*words, "model.name=modernbert-tiny"]).config.data
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    rows = {
        part: [row for _, row in read_rows(Path(path), [data.text_column, data.label_column])]
        for part, path in parts.items()
        if path is not None
    }
    print(json.dumps(rows))
"""


def rows_of(name: str) -> list[dict[str, str]]:
    kinds = ("bad", "good")
    return [
        {"text": f"{name} {n} {kinds[n % 2]}", "label": kinds[n % 2]} for n in range(SIZES[name])
    ]


class Hub(NamedTuple):
    url: str
    asked: list[str]
    home: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a process that knows the hub."""
        self.home.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, *words],
            env=environment(self.url, self.home),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets with files of the usual forms, and one with a script."""
    disable_progress_bars()
    root = tmp_path_factory.mktemp("datasets")
    films, script, table = (root / "owner" / name for name in ("films", "script", "table"))
    for folder in (films / "plain", script, table):
        folder.mkdir(parents=True)
    (films / "README.md").write_text(CARD)
    for name in SIZES:
        Dataset.from_list(rows_of(name), features=FEATURES).to_parquet(films / f"{name}.parquet")
    (table / "README.md").write_text("# A table\n")
    lines = [f"{row['text']},{row['label']}\n" for row in rows_of("short")]
    (table / "train.csv").write_text("text,label\n" + "".join(lines))
    (script / "script.py").write_text("raise SystemExit('this ran')\n")
    (script / "README.md").write_text("# A script\n")
    return root


@pytest.fixture
def hub(root: Path, tmp_path: Path) -> Iterator[Hub]:
    with dataset_hub(root) as (url, asked):
        yield Hub(url, asked, tmp_path / "home")


def test_configs_and_splits_are_read_by_the_library(hub: Hub):
    asked = [
        ["data.train=owner/films"],
        ["data.train=owner/films:short", "data.split=extra"],
        ["data.train=owner/table"],
        ["data.train=owner/films", "data.split=test"],
    ]
    done = hub.run("-c", SETTLED, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    plain, short, table, test = map(json.loads, done.stdout.splitlines())
    train = [*rows_of("plain/train-0"), *rows_of("plain/train-1")]
    assert plain == {"train": train, "test": rows_of("plain/test")}
    assert short == table == {"train": rows_of("short")}
    assert test == {"train": rows_of("plain/test")}
    assert "Generating" not in done.stderr
    files = [one for one in hub.asked if one.startswith("GET") and one.endswith(".parquet")]
    assert len(files) == len(set(files)) == len(SIZES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/script", "owner/script on the hub is a loading script, and no code of the hub is"),
        pytest.param("owner/none", "the hub gives no such dataset: it has no", marks=SLOW),
        pytest.param("owner/films:long", "(BuilderConfig 'long' not found", marks=SLOW),
    ],
)
def test_what_cannot_be_read_is_one_line(name: str, says: str, hub: Hub):
    done = hub.run("-m", "trainfit", "plan", "textclass", name)
    assert done.returncode == 2
    assert "this ran" not in done.stderr
    [line] = done.stderr.splitlines()
    assert says in line


@pytest.mark.soak
def test_a_model_is_planned_and_trained_on_a_dataset_of_the_hub(hub: Hub):
    small = ("model.name=modernbert-tiny", "model.weights=random", "data.max_length=32")
    planned = hub.run("-m", "trainfit", "plan", "textclass", "owner/films", *small, "--json")
    assert planned.returncode == 0, planned.stderr
    once = ("baselines=false", "training.num_epochs=1", "--json")
    trained = hub.run("-m", "trainfit", "train", "textclass", "owner/films", *small, *once)
    assert trained.returncode == 0, trained.stderr
    [data] = json.loads((next(hub.home.glob("runs/*")) / "data.json").read_text())["folds"]
    assert data["classes"] == ["bad", "good"]
    assert data["train"]["texts"] + data["validation"]["texts"] == 121
    assert data["test"]["by_class"] == [20, 20]
