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


@pytest.mark.soak
def test_configs_and_splits_are_read_by_the_library(hub: Hub):
    asked = [
        ["data.train=owner/films"],
        ["data.train=owner/films:short", "data.split=extra"],
        ["data.train=owner/films", "data.split=test"],
    ]
    done = hub.run("-c", SETTLED, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    plain, short, test = map(json.loads, done.stdout.splitlines())
    train = [*rows_of("plain/train-0"), *rows_of("plain/train-1")]
    assert plain == {"train": train, "test": rows_of("plain/test")}
    assert short == {"train": rows_of("short")}
    assert test == {"train": rows_of("plain/test")}
    assert not done.stderr
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
def test_streamed_rows_are_those_that_are_loaded(hub: Hub):
    now = "data.stream_above_gib=0"
    films, table = "data.train=owner/films", "data.train=owner/table"
    done = hub.run("-c", SETTLED, json.dumps([[films, now], [table, now], [table]]))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    both, streamed, loaded = map(json.loads, done.stdout.splitlines())
    train = [*rows_of("plain/train-0"), *rows_of("plain/train-1")]
    assert both == {"train": train, "test": rows_of("plain/test")}
    assert streamed == loaded == {"train": rows_of("short")}


@pytest.mark.soak
def test_a_model_is_planned_and_trained_on_a_dataset_of_the_hub(hub: Hub):
    small = ("model.name=modernbert-tiny", "model.weights=random", "data.max_length=32")
    once = ("baselines=false", "training.num_epochs=1", "data.stream_above_gib=0", "--json")
    trained = hub.run("-m", "trainfit", "train", "textclass", "owner/films", *small, *once)
    assert trained.returncode == 0, trained.stderr
    assert "owner/films is streamed from the hub" in trained.stderr
    planned = hub.run("-m", "trainfit", "plan", "textclass", "owner/films", *small, "--json")
    assert planned.returncode == 0, planned.stderr
    assert "owner/films is taken from the hub" in planned.stderr
    [data] = json.loads((next(hub.home.glob("runs/*")) / "data.json").read_text())["folds"]
    assert data["classes"] == ["bad", "good"]
    assert data["train"]["texts"] + data["validation"]["texts"] == 121
    assert data["test"]["by_class"] == [20, 20]


STREAMED = """
import json, sys
from pathlib import Path
from trainfit.data import learn_tokenizer, token_cache
from trainfit.data.columnar import is_stream
from trainfit.data.hub import fetch_dataset
from trainfit.data.text_files import Columns
from trainfit.data import columnar

made = held = done = 0
read = columnar.read_table

def counted(path, names):
    global made, held
    for row in read(path, names):
        made += 1
        held = max(held, made - done)
        yield row

def progress(count):
    global done
    done = count

columnar.read_table = counted
tokenizer = learn_tokenizer(["film bad good 0 1 2 3 4 5 6 7 8 9"] * 2, vocabulary=320)
found = []
for limit in (0, 2**40):
    folder = fetch_dataset("owner/many", limit)
    how = {"max_length": 16, "columns": Columns(), "processes": 1, "progress": progress}
    read_all = token_cache.tokenize_file(folder / "train", tokenizer, **how)
    found.append((is_stream(folder / "train"), read_all.classes, read_all.tokens))
    if limit == 0:
        print(json.dumps({"held": held, "made": made}))
        left = [p for p in Path(sys.argv[1]).rglob("*") if p.is_file()]
        print(json.dumps([str(p) for p in left if b"a film of the hub" in p.read_bytes()]))
(streamed, classes, ours), (loaded, others, theirs) = found
same = all((getattr(ours, k) == getattr(theirs, k)).all() for k in ("ids", "lengths", "labels"))
print(json.dumps([streamed, loaded, classes == others, bool(same), len(ours)]))
"""
MANY = 20_000


@pytest.mark.soak
def test_a_large_dataset_is_streamed_in_chunks_and_never_stored(hub: Hub, root: Path):
    folder = root / "owner" / "many"
    folder.mkdir()
    rows = {"text": [f"a film of the hub {n}" for n in range(MANY)], "label": [0, 1] * (MANY // 2)}
    many = Dataset.from_dict(rows, features=FEATURES)
    many.to_parquet(folder / "train.parquet", batch_size=1000)
    (folder / "README.md").write_text("# Many\n")
    done = hub.run("-c", STREAMED, str(hub.home))
    assert done.returncode == 0, done.stderr
    counts, stored, compared = map(json.loads, done.stdout.splitlines())
    assert counts["made"] == MANY
    assert counts["held"] <= 2048
    assert stored == []
    assert compared == [True, False, True, True, MANY]
