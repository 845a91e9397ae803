"""What a project that installed trainfit beside its own trainer uses works without the libraries
that only trainfit's own jobs need, and each of those is asked for in one line."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from trainfit.conf import SCHEMAS, composition
from trainfit.core import libraries
from trainfit.core.errors import TrainfitWarning

HERE = Path(__file__).parent
OF_JOBS = ("hydra", "omegaconf", "optuna", "sqlalchemy", "alembic", "peft", "pyarrow", "sklearn")
BESIDE = (*OF_JOBS, "scipy", "datasets", "lightning")
CALLBACK = """
import torch, trainfit
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from trainfit.integrations import TrainfitCallback
size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
rows = [{"input_ids": torch.arange(1, 9), "labels": torch.tensor(0)}] * 16
arguments = TrainingArguments("out", max_steps=8, per_device_train_batch_size=2, report_to=[],
    use_cpu=True, disable_tqdm=True, save_strategy="no")
callback = TrainfitCallback(warm_up=2)
trainer = Trainer(BertForSequenceClassification(BertConfig(vocab_size=32, **size)), arguments,
    train_dataset=rows, callbacks=[callback])
trainer.train()
assert callback.receipt is not None
import beside_step
step = beside_step.build()
one = step[1](step[0])
with trainfit.observe(warm_up=1) as seen:
    for _ in range(4):
        one()
assert seen.receipt is not None
"""


def python(
    folder: Path, *words: str, without: tuple[str, ...] = BESIDE
) -> subprocess.CompletedProcess[str]:
    """Run Python where these libraries are not installed."""
    path = os.pathsep.join([str(HERE / "without"), str(HERE), *filter(None, sys.path)])
    surroundings = os.environ | {
        "PYTHONPATH": path,
        "TRAINFIT_TEST_WITHOUT": ",".join(without),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=surroundings, capture_output=True, text=True
    )


def test_the_libraries_are_hidden(tmp_path: Path) -> None:
    found = "from importlib.util import find_spec; print([name for name in {} if find_spec(name)])"
    assert python(tmp_path, "-c", found.format(BESIDE)).stdout.strip() == "[]"


@pytest.mark.soak
def test_callbacks_and_observe_need_no_library_of_the_jobs(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", CALLBACK)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_verify_and_doctor_need_no_library_of_the_jobs(tmp_path: Path) -> None:
    script = str(HERE / "beside_step.py")
    done = python(tmp_path, "-m", "trainfit", "verify", "--json", "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    optimizer = [i for i in json.loads(done.stdout)["items"] if i["name"] == "fused_optimizer"]
    assert optimizer[0]["status"] == "active"
    assert python(tmp_path, "-m", "trainfit", "doctor", "--json").returncode in (0, 1)


@pytest.mark.soak
def test_check_and_estimate_need_no_library_of_the_jobs(tmp_path: Path) -> None:
    checked = python(tmp_path, "-m", "trainfit", "check", "--gpu", "t4", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["recommended"]["method"] == "frozen"
    asked = "import trainfit; print(trainfit.estimate('beside_step:build', 't4').fits)"
    assert python(tmp_path, "-c", asked).stdout.strip() == "True"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("hpo nli", "hpo needs optuna; pip install 'trainfit[hpo]'"),
        ("hpo status", "hpo needs optuna; pip install 'trainfit[hpo]'"),
        (
            "plan nli --gpu t4 cv.folds=2",
            "the word 'cv.folds=2' needs hydra; pip install hydra-core",
        ),
    ],
)
def test_a_missing_library_is_one_line(tmp_path: Path, command: str, line: str) -> None:
    done = python(tmp_path, "-m", "trainfit", *command.split())
    assert (done.returncode, done.stderr) == (2, f"trainfit: {line}\n")


@pytest.mark.soak
def test_adapters_ask_for_peft(tmp_path: Path) -> None:
    words = ["plan", "nli", "--gpu", "t4", "model.name=modernbert-tiny", "model.method=lora"]
    done = python(tmp_path, "-m", "trainfit", *words, without=("peft",))
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "trainfit: model.method=lora needs peft; pip install peft"
    )


def test_any_library_of_a_command_is_asked_for_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("training: {}\n")
    words = ["plan", "nli", "--gpu", "t4", "--config", "own.yaml"]
    done = python(tmp_path, "-m", "trainfit", *words, without=("omegaconf",))
    assert (done.returncode, done.stderr) == (
        2,
        "trainfit: plan needs omegaconf; pip install hydra-core\n",
    )


@pytest.mark.parametrize("task", list(SCHEMAS))
def test_files_merge_without_hydra_as_with_it(task: str) -> None:
    presets = (None, "auto", "cpu")
    for name, experiment in product(presets, (None, *composition.options(task, "experiment"))):
        groups = {k: v for k, v in {"hardware": name, "experiment": experiment}.items() if v}
        words = tuple(f"{key}={value}" for key, value in groups.items())
        assert composition._plain_compose(task, groups) == composition._hydra_compose(task, words)


def test_a_newer_library_is_a_warning_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.warn_of_newer.cache_clear()
    monkeypatch.setattr(libraries, "NEWEST_TESTED", {"torch": "2.9", "numpy": "99.0"})
    with pytest.warns(TrainfitWarning, match=r"torch 2\.\d+\S* is newer .*\(2\.9\)") as caught:
        libraries.warn_of_newer()
    libraries.warn_of_newer()  # a second warning would be an error here
    assert len(caught) == 1
    libraries.warn_of_newer.cache_clear()
