"""Data sets of the hub: the library is asked once, and read from its own files."""

import json
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from hub_server import environment, silent
from trainfit.conf import TextclassConfig
from trainfit.conf.schema import TextclassData
from trainfit.core import libraries
from trainfit.core.errors import BadInput, RunFailed
from trainfit.data import hub as hub_module
from trainfit.data.hub import PATIENCE, fetch_dataset, is_hub_name
from trainfit.data.row_files import column_names, read_rows
from trainfit.jobs.configuration import configure

ROWS = {
    split: [{"text": f"{split} {n}", "label": n % 2} for n in range(20)]
    for split in ("train", "test", "extra")
}


def unreachable(*_: str) -> bool:
    raise OSError("it sleeps")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A hub that answers; the library's load function hands out data of its form."""
    datasets.disable_progress_bars()
    saved = datasets.DatasetDict({n: datasets.Dataset.from_list(r) for n, r in ROWS.items()})
    saved.save_to_disk(tmp_path / "library", num_shards={"train": 2, "test": 1, "extra": 1})
    asked: list[tuple[str, str | None]] = []

    def load(path: str, subset: str | None) -> datasets.DatasetDict:
        asked.append((path, subset))
        return datasets.load_from_disk(tmp_path / "library")

    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub_module, "reach", lambda _place, _kind: True)
    monkeypatch.setattr(hub_module, "_look_up", lambda _name: None)
    return asked


def settled(*words: str) -> TextclassData:
    composed = configure("textclass", [*words, "model.name=modernbert-tiny"])
    assert isinstance(composed.config, TextclassConfig)
    assert "owner/films:plain is taken from the hub" in composed.notes
    return composed.config.data


@pytest.mark.soak
def test_splits_are_read_from_the_librarys_files(hub: list[tuple[str, str | None]]):
    data = settled("data.train=owner/films:plain")
    assert hub == [("owner/films", "plain")]
    assert data.validation is None
    for split, path in (("train", data.train), ("test", data.test)):
        assert path is not None
        assert column_names(Path(path)) == ["text", "label"]
        assert [row for _, row in read_rows(Path(path), ["text", "label"])] == ROWS[split]
        links = list(Path(path).glob("*.arrow"))
        assert links
        assert all(link.is_symlink() for link in links)
    other = settled("data.train=owner/films:plain", "data.split=extra")
    assert (Path(str(other.train)).name, other.test) == ("extra", None)
    assert len(hub) == 1


def test_the_hub_is_asked_again_only_where_its_files_are_gone(
    hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
):
    folder = fetch_dataset("films")
    monkeypatch.setattr(hub_module, "reach", unreachable)
    assert fetch_dataset("films") == folder
    next(folder.glob("train/*.arrow")).unlink()
    next(folder.glob("test/*.arrow")).resolve().unlink()
    with pytest.raises(BadInput, match="the hub gives no such dataset: it sleeps"):
        fetch_dataset("films")
    assert len(hub) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.split=nowhere"], "no split nowhere; name one of extra, test, train"),
        (["data.split=../x"], "no split ../x"),
        (["data.text_column=review"], "has no column review; its columns are text, label"),
    ],
)
def test_mistakes_name_what_is_there(hub: list[object], words: list[str], message: str):
    with pytest.raises(BadInput) as caught:
        settled("data.train=owner/films:plain", *words)
    assert message in str(caught.value)


def test_a_file_has_no_split(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,label\nx,1\n")
    with pytest.raises(BadInput, match=r"has no splits; leave data\.split out"):
        settled(f"data.train={tmp_path / 'a.csv'}", "data.split=train")


def test_an_error_of_the_library_is_one_line(hub: list[object], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'films' doesn't exist\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(BadInput, match="cannot load films from the hub") as caught:
        fetch_dataset("films")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.soak
def test_an_unreachable_hub_costs_seconds(tmp_path: Path):
    (tmp_path / "home").mkdir()
    with silent() as url:
        env = environment(url, tmp_path / "home")
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "trainfit", "train", "textclass", "someone/films"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert time.monotonic() - begun < PATIENCE + 10  # with the start of Python on a busy machine
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"the hub gives no such dataset: {url} does not answer" in line


def test_only_a_folder_of_our_own_cache_stands_for_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    about = {"name": "owner/films", "subset": None, "split": "train", "revision": "0" * 40}
    for folder in (tmp_path / "given", tmp_path / "cache" / "hub" / "x-stream" / "train"):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"_data_files": []}')
        (folder / "stream.json").write_text(json.dumps(about))
    with pytest.raises(BadInput, match="does not list the rows"):
        column_names(tmp_path / "given")
    with pytest.raises(RunFailed, match="the hub does not send owner/films, split train; check"):
        column_names(folder)  # since no test may ask the hub


def test_a_missing_library_is_one_line(hub: list[object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "has", lambda module: module != "datasets")
    with pytest.raises(BadInput, match=r"needs datasets; pip install 'trainfit\[data\]'"):
        fetch_dataset("films")


def test_names_of_the_hub_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    for name in ("imdb", "stanfordnlp/imdb", "nyu-mll/glue:sst2", "ag_news", "a/squad_v1.1"):
        assert is_hub_name(name)
    others = ["here", "gone", "reviews.csv", "a/b.parquet", "/imdb", "./imdb", "~/imdb", "a/b/c"]
    for name in (*others, "", "..", "a b", "x" * 500, "data/", "imdb\n", "notes.txt"):
        assert not is_hub_name(name)
