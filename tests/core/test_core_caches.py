"""Caches: damaged anywhere means thrown away with a word, and made anew."""

import json
import os
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainfit.core import caches
from trainfit.core.errors import TrainfitWarning
from trainfit.data.text_files import Columns
from trainfit.data.token_cache import tokenize_file
from trainfit.data.tokenizers import learn_tokenizer


@dataclass(frozen=True)
class Found:
    name: str
    values: tuple[float, ...]
    more: dict[str, int]


RECORD = Found(name="é", values=(0.1, float("inf"), 3e-9), more={"b": 2, "a": 1})


def flipped(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def test_a_record_comes_back_and_any_flipped_bit_is_noticed(tmp_path: Path):
    path, draw = tmp_path / "a" / "b.json", random.Random(1)
    assert caches.read(Found, path) is None
    assert caches.write(path, RECORD)
    whole = path.read_bytes()
    assert caches.read(Found, path) == RECORD
    for _ in range(300):
        path.write_bytes(flipped(whole, draw))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = caches.read(Found, path)
        # A bit of white space is the only one that does not matter.
        assert found == RECORD or (found is None and len(said) == 1 and not path.exists())


@pytest.mark.parametrize("kind", ["empty", "folder", "pipe", "loop", "list"])
def test_whatever_is_in_the_place_of_a_record_is_removed(tmp_path: Path, kind: str):
    path = tmp_path / "a.json"
    make = {
        "empty": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to("a.json"),
        "list": lambda: path.write_text("[]"),
    }
    make[kind]()
    with pytest.warns(TrainfitWarning, match="is damaged and was thrown away"):
        assert caches.read(Found, path) is None
    assert caches.write(path, RECORD)
    assert caches.read(Found, path) == RECORD


def test_damaged_tokens_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    path, draw = tmp_path / "a.jsonl", random.Random(2)
    rows = [{"text": f"word {n}", "label": n % 3, "who": f"w{n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = learn_tokenizer([row["text"] for row in rows])

    def read() -> tuple[list[int], list[int], list[int]]:
        found = tokenize_file(path, tokenizer, max_length=9, columns=Columns(group="who")).tokens
        assert found.groups is not None
        return found.ids.tolist(), found.labels.tolist(), found.groups.tolist()

    first = read()
    [folder] = (tmp_path / "cache" / "tokens").iterdir()
    for name in ("tokens", "lengths", "labels", "groups", "meta.json"):
        file = folder / name
        file.write_bytes(flipped(file.read_bytes().strip(), draw))
        with pytest.warns(TrainfitWarning, match="is damaged and was thrown away"):
            assert read() == first
        file.unlink()
        os.mkfifo(file)
        with pytest.warns(TrainfitWarning, match="is damaged and was thrown away"):
            assert read() == first
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "file"))
    with pytest.warns(TrainfitWarning, match="set TRAINFIT_CACHE"):
        assert read() == first
