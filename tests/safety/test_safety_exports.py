"""An export is checked before it is loaded: what is damaged, exchanged or added is one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_tiny import TINY, tiny

from trainfit.cli.main import run
from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data import learn_tokenizer
from trainfit.jobs import exports
from trainfit.jobs import exports as gpt_export
from trainfit.jobs.models.gpt_model import Gpt, GptShape
from trainfit.jobs.predict import load_export


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an exported LoRA model."""
    folder = tmp_path_factory.mktemp("run")
    sizes = TINY["bert-base"] | {"vocab_size": 320}
    model = tiny("bert-base", method="lora", overrides=sizes).eval()
    facts = {"classes": ["x", "y", "z"], "max_length": 38, "pad_id": 0, "eval_batch_size": 8}
    tokenizer = learn_tokenizer(["some words to learn from"], vocabulary=320)
    exports.write_classifier(folder / "export", model, tokenizer, facts)
    (folder / "run.json").write_text('{"id": "0"}')
    return folder


def test_every_file_has_its_checksum(exported: Path):
    folder = exported / "export"
    wanted = json.loads((folder / "checksums.json").read_text())["sha256"]
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert wanted == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "checksums.json"
    }
    assert {"head.json", "encoder/model.safetensors", "tokenizer_config.json"} <= set(wanted)
    load_export(folder)


def _flip(folder: Path) -> None:
    path = folder / "encoder" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _exchange(folder: Path) -> None:
    shutil.copyfile(folder / "encoder" / "config.json", folder / "tokenizer_config.json")


CHANGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors is damaged": _flip,
    "tokenizer_config.json is damaged": _exchange,
    "lacks a file": lambda folder: (folder / "adapter" / "adapter_config.json").unlink(),
    "chat_template.jinja is not of this export": lambda folder: (
        folder / "chat_template.jinja"
    ).write_text("{{ 1 }}"),
    "pytorch_model.bin is not of this export": lambda folder: (
        folder / "encoder" / "pytorch_model.bin"
    ).write_bytes(b"x"),
    "cannot read": lambda folder: (folder / "checksums.json").write_text('{"sha256": 3}'),
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_changed_export_is_one_line(
    says: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(exported, tmp_path / "run")
    CHANGES[says](folder / "export")
    assert run(["predict", str(folder), "--text", "some words"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


def test_an_export_of_an_earlier_version_is_read_with_a_note(exported: Path, tmp_path: Path):
    folder = shutil.copytree(exported / "export", tmp_path / "export")
    (folder / "checksums.json").unlink()
    with pytest.warns(TrainfitWarning, match=r"no checksums\.json"):
        load_export(folder)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_length": -1}, "max_length is -1"),
        ({"max_length": "8"}, 'max_length.*"8"'),
        ({"classes": [1, 2]}, r"classes: \[0\] is 1"),
    ],
)
def test_facts_of_a_wrong_kind_are_one_line(
    changed: dict[str, Any], says: str, exported: Path, tmp_path: Path
):
    folder = shutil.copytree(exported / "export", tmp_path / "export")
    path = folder / "head.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    exports.write_checksums(folder)
    with pytest.raises(BadInput, match=rf"cannot read head.json in .*{says}"):
        load_export(folder)


def test_notes_and_hidden_files_may_be_added(exported: Path, tmp_path: Path):
    folder = shutil.copytree(exported / "export", tmp_path / "export")
    (folder / "README.md").write_text("a model")
    (folder / ".gitattributes").write_text("x")
    exports.check_export(folder)


def test_an_adapter_names_nothing_to_import(exported: Path, tmp_path: Path):
    folder = shutil.copytree(exported / "export", tmp_path / "export")
    (tmp_path / "trapdoor.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    path = folder / "adapter" / "adapter_config.json"
    fields = {"megatron_config": {"a": 1}, "megatron_core": "trapdoor", "auto_mapping": {"a": "b"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    exports.write_checksums(folder)
    assert load_export(folder).model.encoder.peft_config["default"].megatron_config is None
    assert not (tmp_path / "ran").exists()


def test_a_gpt_is_checked_too(tmp_path: Path):
    shape = GptShape(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=8)
    gpt_export.write_gpt(tmp_path / "export", Gpt(shape), None)
    assert gpt_export.read_gpt(tmp_path / "export").shape.n_embd == 8
    path = tmp_path / "export" / "config.json"
    path.write_text(path.read_text().replace('"n_layer": 1', '"n_layer": 2'))
    with pytest.raises(BadInput, match=r"config\.json is damaged"):
        gpt_export.read_gpt(tmp_path / "export")
    path.write_text('{"model_type": "gpt2", "n_layer": "many"}')
    exports.write_checksums(tmp_path / "export")
    with pytest.raises(BadInput, match="cannot load a GPT"):
        gpt_export.read_gpt(tmp_path / "export")
