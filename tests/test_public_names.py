import subprocess
import sys

import pytest

import trainfit
from trainfit.core.errors import BadInput


@pytest.mark.parametrize("name", trainfit.__all__)
def test_a_public_name_is_there(name: str):
    assert getattr(trainfit, name)
    assert name in dir(trainfit)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'detekt'"):
        trainfit.detekt  # noqa: B018


def test_names_are_loaded_when_they_are_used():
    code = (
        "import sys, trainfit\n"
        "assert not {'torch', 'trainfit.hardware'} & set(sys.modules)\n"
        "from trainfit import detect, lookup\n"
        "assert 'torch' not in sys.modules and 'trainfit.hardware' in sys.modules\n"
        "assert lookup('NVIDIA H200').slug == 'h200-sxm-141gb'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_text_alone_is_one_item_and_not_its_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit._folder", lambda run: run)
    monkeypatch.setattr("trainfit.runs.run_folder.exports_of", lambda run: [run])
    monkeypatch.setattr("trainfit.runs.run_folder.export_facts", lambda export: {})
    monkeypatch.setattr("trainfit.jobs.predict.answer", lambda exports, texts, *more: texts)
    assert trainfit.predict("run", "a film") == ["a film"]
    with pytest.raises(BadInput, match="an item is a int; give texts"):
        trainfit.predict("run", [5])
    monkeypatch.setattr("trainfit.runs.run_folder.export_facts", lambda export: {"pairs": True})
    with pytest.raises(BadInput, match="an item is a str; give pairs of texts"):
        trainfit.predict("run", ("a film", "a book"))
    with pytest.raises(BadInput, match="an item has 3 texts; give pairs of texts"):
        trainfit.predict("run", [("a", "b", "c")])
    monkeypatch.setattr("trainfit.runs.run_folder.export_facts", lambda export: {"task": "tokens"})
    with pytest.raises(BadInput, match="an item is a int; give texts or lists of words"):
        trainfit.predict("run", [5])
