import subprocess
import sys
from typing import Any

import pytest
import torch

import trainfit
from trainfit.core.errors import BadInput


@pytest.mark.parametrize("name", trainfit.__all__)
def test_a_public_name_is_there(name: str):
    assert getattr(trainfit, name)
    assert name in dir(trainfit)


@pytest.mark.parametrize(
    ("name", "args", "given", "words"),
    [
        ("as_if", (3,), {}, "spec of trainfit.as_if is 3; give GpuSpec | str"),
        ("as_if", ("nope",), {}, "nope"),
        ("recommend", ("t4",), {}, "profile of trainfit.recommend is 't4'; give HardwareProfile"),
        ("compose", (None,), {}, "task of trainfit.compose is None; give str"),
        ("compose", ("nli", 3), {}, "overrides of trainfit.compose is 3; give Sequence[str]"),
        ("estimate", ("os:getcwd", None), {}, "gpu of trainfit.estimate is None"),
        ("estimate", ("os:getcwd", "t4", "8"), {}, "capacity_gib of trainfit.estimate is '8'"),
        ("find_batch_size", (3,), {}, "task of trainfit.find_batch_size is 3"),
        ("find_batch_size", ("a:b",), {"margin": "x"}, "margin of trainfit.find_batch_size"),
        ("tunable", (1.0,), {"low": "a", "high": 2.0}, "low of trainfit.tunable is 'a'"),
        ("tunable", (1.0,), {"choices": 3}, "choices of trainfit.tunable is 3"),
        ("unpadded", (None,), {}, "model of trainfit.unpadded is None"),
        ("speed_up", (None,), {"only": 3}, "only of trainfit.speed_up is 3"),
        ("apply", ({},), {}, "the settings are {}; give RuntimeSettings or a Plan"),
        ("plan", ("nli",), {"lengths": 3}, "lengths of trainfit.plan is 3"),
        ("hpo", ("nli", None), {}, "the override None is no text"),
        ("doctor", (), {"log": 3}, "the log is 3"),
        ("doctor", (), {"log": "a\0b"}, "cannot read the log"),
        ("predict", ("images:Images", None), {}, "the items are None"),
    ],
)
def test_a_wrong_argument_is_one_line(name: str, args: Any, given: Any, words: str):
    with pytest.raises(BadInput) as refused:
        getattr(trainfit, name)(*args, **given)
    assert words in str(refused.value)


def test_wrong_settings_of_a_block_are_one_line():
    with pytest.raises(BadInput, match="the settings are None"), trainfit.applied(None):
        pass


def test_other_errors_of_a_call_stay_as_they_are():
    """A mistake in code of the user's is no wrong argument."""
    with pytest.raises(TypeError, match="missing"):
        trainfit.compose()

    class Odd(torch.nn.Module):
        def children(self) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainfit.unpadded(Odd())


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
