"""`train` with a model folder: its own tokenizer, or a line that says there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from job_tiny import be_quick, write_texts
from tokenizer_folders import KINDS, tokenizer_folder
from trainfit.cli.main import run
from trainfit.data import load_tokenizer


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def words(tmp: Path, model: Path) -> list[str]:
    data = write_texts(tmp / "data.csv", 40)
    return [
        *("train", "textclass", f"model.name={model}", f"data.train={data}"),
        *(f"runs_dir={tmp / 'runs'}", "data.max_length=60", "model.method=full", "--json"),
        *("training.max_steps=2", "baselines=false", "training.profile_step=false"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_predict_take_the_folders_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    model = tokenizer_folder(tmp_path / "model", kind, weights=True)
    assert run(words(tmp_path, model)) == 0
    folder = Path(json.loads(capsys.readouterr().out)["run"])
    text = "the quiet river"
    found, wanted = (load_tokenizer(str(place)) for place in (folder / "export", model))
    assert found(text)["input_ids"] == wanted(text)["input_ids"]
    assert str(tmp_path) not in (folder / "export" / "tokenizer_config.json").read_text()
    assert run(["predict", str(folder), "--text", text]) == 0


def test_pretrained_weights_without_a_tokenizer_are_one_line_and_no_torch(tmp_path: Path):
    model = tokenizer_folder(tmp_path / "model", None)
    code = (
        "import sys\nfrom trainfit.cli.main import run\n"
        "print(run(sys.argv[1:]), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words(tmp_path, model)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "2 False"
    [line] = done.stderr.strip().splitlines()
    assert f"no tokenizer in {model}" in line
    assert "model.weights=random" in line
    assert not (tmp_path / "runs").exists()


def test_random_weights_learn_a_tokenizer_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    model = tokenizer_folder(tmp_path / "model", None)
    assert run([*words(tmp_path, model), "model.weights=random", "--dry-run"]) == 0
    assert "one is learned from the data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "nowhere"}, "cannot build a bert of .*nowhere"),
        ({"dtype": "nowhere"}, "cannot build a bert of .*nowhere"),
        ({"model_type": "deberta-v2", "pooler_hidden_act": "nowhere"}, "cannot build .*nowhere"),
        ({"model_type": "deberta-v2", "conv_kernel_size": 3, "conv_act": "nowhere"}, "conv_act"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "nowhere"}}, "cannot .*nowhere"),
        ({"max_position_embeddings": 4}, "has 4 positions; set it to 4 or less"),
    ],
)
def test_a_model_that_cannot_be_built_or_used_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    said: str,
):
    """Planning builds nothing where a bound of memory decides."""
    be_quick(monkeypatch)
    model = tokenizer_folder(tmp_path / "model", None)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | change))
    for more in (["--dry-run"], []):
        assert run([*words(tmp_path, model), "model.weights=random", *more]) == 2
        assert re.search(said, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_is_too_large_for_the_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    model = tokenizer_folder(tmp_path / "model", "wordpiece")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"vocab_size": 40}))
    assert run([*words(tmp_path, model), "model.weights=random"]) == 2
    *notes, line = capsys.readouterr().err.splitlines()
    assert all("note:" in note for note in notes), notes
    assert "embeddings for 40 only" in line
    assert not (tmp_path / "runs").exists()
