"""ONNX of an export gives transformers' logits in onnxruntime, for batches of any shape."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_tiny import config_of, own
from test_jobs_standard_export import CLASSES, TEXTS, write
from test_jobs_train_export import plain_logits
from test_jobs_train_export import trained as trained_apart
from test_jobs_train_export import write as write_apart
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from trainfit.cli.main import run
from trainfit.core import libraries
from trainfit.data import learn_tokenizer
from trainfit.jobs import exports, onnx_export
from trainfit.jobs.models.classifier import EncoderClassifier, MeanPooler

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # for this file's own import, which would send events
onnxruntime = pytest.importorskip("onnxruntime")
BATCHES = (TEXTS[:1], TEXTS, [*TEXTS, " ".join(TEXTS), "of"])


def trained(name: str, layers: int = 1, **settings: Any) -> EncoderClassifier:
    """A model whose adapters and head are not what they were built as."""
    size = {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    model = own(config_of(name, vocab_size=320, **size), **settings)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the ONNX of a BERT."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "run.json").write_text('{"id": "0"}')
    write(folder / "export", trained("bert"))
    assert run(["export", str(folder), "--onnx"]) == 0
    return folder


def check_logits(export: Path) -> None:
    """Compare with the classifier that transformers loads, without a line of trainfit."""
    plain = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    session = onnxruntime.InferenceSession(export / "onnx" / "model.onnx")
    names = [one.name for one in session.get_inputs()]
    for texts in BATCHES:
        rows = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
        assert set(names) == set(rows)
        with torch.no_grad():
            wanted = plain(**{n: torch.from_numpy(one) for n, one in rows.items()}).logits
        [found] = session.run(["logits"], dict(rows))
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4, rtol=1e-4)


def test_onnxruntime_gives_the_logits_of_transformers(bert: Path):
    check_logits(bert / "export")
    exports.check_export(bert / "export")
    assert sorted(path.name for path in bert.iterdir()) == ["export", "run.json"]
    content = (bert / "export" / "onnx" / "model.onnx").read_bytes()
    assert b".py" not in content  # no lines of source, with paths of this machine
    assert run(["predict", str(bert), "--text", "one"]) == 0


def test_onnxruntime_tells_nobody_of_an_export(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It writes an identifier of the machine into the home folder before it sends events."""
    seen = []
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    monkeypatch.setattr(onnx_export, "_convert", lambda *_: seen.append(dict(os.environ)))
    monkeypatch.setattr(onnx_export, "_compare", lambda *_: None)
    copy = Path(shutil.copytree(bert / "export", tmp_path / "export"))
    onnx_export.write_onnx(copy)
    home = tmp_path / "home"
    home.mkdir()
    told = {"ORT_DISABLE_TELEMETRY": seen[0]["ORT_DISABLE_TELEMETRY"], "HOME": str(home)}
    subprocess.run([sys.executable, "-c", "import onnxruntime"], env=told, check=True)
    assert not list(home.rglob("*"))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "layers", "settings"),
    [
        ("deberta-v3", 2, {}),
        ("modernbert-mean", 4, {}),  # both kinds of its attention
        ("roberta", 1, {"method": "lora", "lora_rank": 4}),
        ("gpt2", 1, {"method": "dora", "lora_rank": 4}),
        ("llama", 1, {}),
        ("gemma-2", 2, {}),
    ],
)
def test_other_families(name: str, layers: int, settings: dict[str, Any], tmp_path: Path):
    write(tmp_path / "export", trained(name, layers, **settings))
    onnx_export.write_onnx(tmp_path / "export")
    check_logits(tmp_path / "export")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it"])
def test_a_head_apart_and_a_decoder_that_looks_both_ways(name: str, tmp_path: Path):
    write_apart(tmp_path / "export", trained_apart(name, "dora"))
    onnx_export.write_onnx(tmp_path / "export")
    session = onnxruntime.InferenceSession(tmp_path / "export" / "onnx" / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    rows = dict(tokenizer(TEXTS, padding=True, return_tensors="np"))
    [found] = session.run(["logits"], {one.name: rows[one.name] for one in session.get_inputs()})
    wanted = plain_logits(tmp_path / "export", adapter=True).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.soak
def test_a_model_of_words_gives_the_logits_of_every_token(tmp_path: Path):
    facts = {"classes": CLASSES, "max_length": 38, "pad_id": 0, "eval_batch_size": 8}
    facts |= {"task": "tokens", "problem_type": "token_classification"}
    tokenizer = learn_tokenizer(TEXTS, vocabulary=320)
    model = trained("bert", words=True)
    exports.write_classifier(tmp_path / "export", model, tokenizer, facts)
    onnx_export.write_onnx(tmp_path / "export")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "export").eval()
    rows = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = plain(**rows).logits.numpy()
    session = onnxruntime.InferenceSession(tmp_path / "export" / "onnx" / "model.onnx")
    given = {one.name: rows[one.name].numpy() for one in session.get_inputs()}
    [found] = session.run(["logits"], given)
    real = rows["attention_mask"].bool().numpy()
    np.testing.assert_allclose(found[real], wanted[real], atol=1e-4, rtol=1e-4)


def files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def said_by(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert run(arguments) == code
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert not said.out
    return line


@pytest.mark.soak
def test_a_model_that_cannot_be_converted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run.json").write_text('{"id": "0"}')
    write(tmp_path / "export", trained("bert"))
    before = files(tmp_path)

    def chosen_by_value(self: MeanPooler, hidden: torch.Tensor, layout: Any) -> torch.Tensor:
        return hidden[:, 0] if hidden.sum() > 0 else hidden[:, -1]

    monkeypatch.setattr(MeanPooler, "forward", chosen_by_value)
    line = said_by(["export", str(tmp_path), "--onnx"], capsys, 1)
    assert "cannot be converted to ONNX (" in line
    assert "use the export as it is" in line
    assert files(tmp_path) == before


def test_other_logits_are_not_kept(
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "run.json").write_text('{"id": "0"}')
    torch.manual_seed(7)
    other = trained("bert")
    with torch.no_grad():
        other.head.model.classifier.bias += 0.001
    tokenizer = learn_tokenizer(TEXTS, vocabulary=320)
    facts = {"classes": CLASSES, "max_length": 38, "pad_id": 0, "eval_batch_size": 8}
    exports.write_classifier(tmp_path / "export", other, tokenizer, facts)
    before = files(tmp_path)
    made = bert / "export" / "onnx" / "model.onnx"
    monkeypatch.setattr(onnx_export, "_convert", lambda _, path, *__: shutil.copy(made, path))
    line = said_by(["export", str(tmp_path), "--onnx"], capsys, 1)
    assert "logits of its ONNX are off by 0.001 on 1×1 tokens" in line
    assert files(tmp_path) == before


def test_mistakes_are_one_line(
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert "nothing to export; give --onnx" in said_by(["export", str(bert)], capsys, 2)
    (tmp_path / "run.json").write_text('{"id": "0"}')
    line = said_by(["export", str(tmp_path), "--onnx"], capsys, 2)
    assert "has no exported model" in line
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")  # a GPT's, which is no classifier
    line = said_by(["export", str(tmp_path), "--onnx"], capsys, 2)
    assert (
        line
        == f"trainfit: the model of {tmp_path} is no classifier; try trainfit sample {tmp_path}"
    )
    monkeypatch.setattr(libraries, "has", lambda module: module != "onnxscript")
    monkeypatch.delitem(sys.modules, "trainfit.jobs.onnx_export", raising=False)
    line = said_by(["export", str(bert), "--onnx"], capsys, 2)
    assert line == "trainfit: --onnx needs onnxscript; pip install 'trainfit[onnx]'"
