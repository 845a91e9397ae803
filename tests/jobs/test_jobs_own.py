"""Jobs of the user's own: the files of docs/jobs through every command."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from planning_models import write_bert
from torch import nn

import trainfit
from hub_server import environment, hub
from plan_example import make_plan
from trainfit.cli.inference import _csv, read_items
from trainfit.cli.main import run as command
from trainfit.cli.main import trainfit as cli
from trainfit.conf import compose
from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitWarning
from trainfit.core.plan_records import Plan
from trainfit.hardware import detect
from trainfit.integrations import plan_exports
from trainfit.jobs import own_steps, registry
from trainfit.jobs.own import OwnTask, prepare
from trainfit.jobs.own_steps import find_shape, summed
from trainfit.jobs.registry import config_class
from trainfit.planning.cuts import fixed_settings
from trainfit.runs.run_folder import METRICS, exports_of

DOCS = Path(__file__).parents[2] / "docs" / "jobs"
EFFECTIVE = ("training.effective_batch_size=32",)
FAST = ("epochs=1", "device.num_threads=1", "device.mixed_precision=off", "training.num_workers=0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the jobs of the documentation in it."""
    for path in DOCS.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _forget()  # other tests may have imported their own copies
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in ("images", "two_towers", "mine"):
        sys.modules.pop(name, None)


def run(*words: str) -> Any:
    """Run a command and return its JSON, or its text."""
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, result.output
    out = result.stdout
    return json.loads(out[out.index("{") if "{" in out else 0 :]) if "--json" in words else out


@pytest.mark.parametrize(
    "job",
    ["images:Images", pytest.param("two_towers:TwoTowers", marks=pytest.mark.soak)],
)
def test_every_command_takes_a_job_of_ones_own(here: Path, job: str) -> None:
    assert run("plan", job, *FAST, "--json")["fits"] is True
    trained = run("train", job, *FAST, "--json")
    assert trained["status"] == "finished"
    assert (Path(trained["run"]) / "export" / "model.safetensors").is_file()
    study = run("hpo", job, *FAST, "hpo.trials=2", "--json")
    assert study["trials"]["complete"] == 2
    receipt = run("verify", job, "--strict", "--json")
    assert {item["name"]: item["status"] for item in receipt["items"]}["mixed_precision"] == "off"
    assert Path(run("report", job).strip().splitlines()[-1]).is_file()
    if job == "images:Images":
        bright = torch.zeros(16, 16)
        bright[8:, 8:] = 1
        text = json.dumps(bright.flatten().tolist())
        named = run("predict", job, "--text", text, "--run", trained["run"])
        assert set(json.loads(named)[0]) == {"quarter"}
        given = [bright.flatten().tolist()]
        assert trainfit.predict(job, given, folder=trained["run"]) == json.loads(named)
        other = (here / "images.py").read_text().replace("4 * width, 4", "4 * width, 5")
        (here / "mine.py").write_text(other)
        with pytest.raises(BadInput, match=r"has weights of another model .*give a run of mine"):
            trainfit.predict("mine:Images", given, folder=trained["run"])


@pytest.mark.soak
@pytest.mark.parametrize(("job", "batch"), [("images:Images", 32), ("two_towers:TwoTowers", 64)])
def test_a_job_of_ones_own_is_tuned(here: Path, job: str, batch: int) -> None:
    tuned = run("tune", job, *FAST, "--minutes", "0.1", "--json")
    assert tuned["best"]["effective_batch_size"] == batch


def test_the_files_are_short_and_import_only_trainfit_of_ours() -> None:
    for path in DOCS.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 60
        ours = [line for line in lines if "trainfit" in line and "import" in line]
        assert ours == ["import trainfit"]


@pytest.mark.soak
def test_the_job_learns_and_a_python_call_is_the_command(here: Path) -> None:
    from images import Images

    result = trainfit.train(Images, *FAST[1:])
    assert result.metrics["accuracy"] > 0.9  # by chance 0.25
    assert trainfit.verify(Images).run == result.run
    with pytest.raises(BadInput, match="its own configuration"):
        trainfit.train(Images, "epochs=2", resume=result.run)


@pytest.mark.soak
def test_a_run_goes_on_to_the_same_bits(here: Path) -> None:
    words = ("two_towers:TwoTowers", *FAST[1:], "training.checkpoint_steps=4", "tune=off")
    whole = trainfit.train(*words, "training.max_steps=12")
    part = trainfit.train(*words, "training.max_steps=12")
    run_folder = Path(part.run)
    for name in ("results.json", "result.json"):
        (run_folder / name).unlink()
    shutil.rmtree(run_folder / "export")
    for step in run_folder.glob("checkpoints/*"):
        if not step.name.endswith("4"):
            shutil.rmtree(step)
    again = trainfit.train("two_towers:TwoTowers", resume=run_folder)
    weights = [(Path(r.run) / "export" / "model.safetensors").read_bytes() for r in (whole, again)]
    assert weights[0] == weights[1]


def test_an_indivisible_step_is_one_micro_batch_whatever_the_memory(here: Path) -> None:
    composed = compose_own("two_towers:TwoTowers")
    question = prepare(composed).question()
    assert question.pins["gradient_accumulation_steps"].value == 1
    plan = trainfit.plan("two_towers:TwoTowers", gpu="t4")
    assert (plan.gradient_accumulation_steps, plan.cuts) == (1, (1,))
    assert plan.attention == "job"  # it has none


def test_a_model_with_batch_norm_is_planned_in_one_piece(here: Path) -> None:
    """Without weights or values; the loop's own check is of the real model."""
    own(here, first="nn.BatchNorm1d(3), ")
    asked = prepare(compose_own("mine:Mine")).question()
    assert asked.pins["gradient_accumulation_steps"].value == 1
    cpu = detect()
    fixed_settings(asked, cpu, 1)
    with pytest.raises(BadInput, match="divided over 2 ranks, but the model has BatchNorm"):
        fixed_settings(asked, cpu, 2)
    asked = prepare(compose_own("mine:Mine", "training.batch_size=4", *EFFECTIVE)).question()
    with pytest.raises(BadInput, match=r"cut into 2 micro-batches.*leave batch_size"):
        fixed_settings(asked, cpu, 1)
    assert prepare(compose_own("images:Images")).question().indivisible is None
    plan = trainfit.plan("mine:Mine", gpu="t4")
    assert plan.memory is not None
    assert plan.memory.parameters == 3 + 3 + 3 * 2 + 2  # and no running statistics


def exported(form: str, composed: Any, **changes: Any) -> plan_exports.Handover:
    sizes = {"batch_size": 32, "micro_batch_tokens": 32, "effective_batch_size": 32}
    plan = make_plan(**sizes | changes)
    work = replace(plan.workload, lengths=(1, 1), max_length=1, method="full")
    return plan_exports.FORMATS[form](replace(plan, workload=work), composed)


def test_a_plan_of_ones_own_job_is_exported(here: Path) -> None:
    composed = compose_own("images:Images", "width=48", "lr=0.02", "training.max_steps=3")
    arguments = json.loads(exported("hf", composed).text)
    assert (arguments["learning_rate"], arguments["per_device_train_batch_size"]) == (0.02, 32)
    again = compose("images:Images", exported("hydra", composed).text.splitlines())
    assert (again.config.job.width, again.config.training.learning_rate) == (48, 0.02)
    assert "trainfit train images:Images " in exported("shell", composed).text
    for form in plan_exports.FORMATS:
        said = " ".join(exported(form, composed).notes)
        assert not any(word in said for word in ("tokens", "sequences", "of its own"))


@pytest.mark.parametrize("form", ["hf", "lightning", "accelerate"])
def test_an_export_says_what_only_the_jobs_class_knows(here: Path, form: str) -> None:
    composed = compose_own("two_towers:TwoTowers")
    whole, cut = (" ".join(exported(form, composed, batch_size=n).notes) for n in (32, 16))
    assert "TwoTowers has an optimizer of its own: use it instead of AdamW" in whole
    assert "must not be cut" not in whole
    assert "TwoTowers must not be cut: 2 batches to a step" in cut


@pytest.mark.soak
def test_pages_speak_of_samples(here: Path) -> None:
    result = trainfit.train("images:Images", *FAST)
    rows = [json.loads(line) for line in (Path(result.run) / METRICS).read_text().splitlines()]
    assert [row["accuracy"] for row in rows if row["kind"] == "evaluation"]
    log = (Path(result.run) / "train.log").read_text()
    assert "samples" in log
    assert not any(word in log for word in ("tokens", "padded", "attention"))
    page = run("plan", "images:Images", "--gpu", "t4")
    assert not any(word in page for word in ("padd", "document", "tokens/s", "sequences"))
    plan = Plan.load(Path(result.run) / "plan.json")
    assert plan.memory is None or plan.memory.error_percent is None  # no CNN was recorded


def test_an_edited_job_gets_another_plan(here: Path) -> None:
    before = prepare(compose_own("images:Images")).question()
    text = (here / "images.py").read_text()
    (here / "images.py").write_text(text.replace("AvgPool2d(8)", "MaxPool2d(8)"))
    after = prepare(compose_own("images:Images")).question()
    assert before.arguments["source"] != after.arguments["source"]


def test_fields_become_keys_and_tunables_become_the_space(here: Path) -> None:
    composed = compose_own("images:Images", "width=24", "lr=0.02")
    assert composed.values()["job.width"] == 24
    assert composed.values()["training.learning_rate"] == 0.02
    job = registry.load("images:Images")
    config = registry.own_config(job, composed.config)
    assert (config.width, config.lr, config.effective_batch) == (24, 0.02, 32)
    from trainfit.conf.search_space_files import compose_study

    space = compose_study("images:Images", []).hpo.space
    assert {key: (one.kind, one.low, one.high) for key, one in space.items()} == {
        "training.learning_rate": ("log", 1e-3, 3e-2)
    }


def test_a_number_is_searched_as_one_whatever_its_default(here: Path) -> None:
    from trainfit.conf.search_space_files import compose_study

    own(here, "class Config:\n        scale: float = trainfit.tunable(1, low=0.5, high=4.0)")
    registry.load("mine:Mine")
    assert compose_study("mine:Mine", []).hpo.space["job.scale"].kind == "uniform"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nowhere:Job", "no module"),
        ("images:Nothing", "no trainfit.Job called Nothing"),
        ("images:nn", "no trainfit.Job called nn"),
        ("ima ges:Images", "names no job"),
        ("imagse", "unknown job 'imagse'"),
        ("images.py:Images", "write images:Images"),
    ],
)
def test_a_wrong_name_is_one_line(here: Path, capsys: Any, task: str, words: str) -> None:
    assert command(["train", task]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


MINE = """
import torch, trainfit
from torch import nn
class Mine(trainfit.Job):
    {body}
    def data(self, split):
        return [(torch.full((3,), float(i)), torch.tensor(i % 2)) for i in range(8)]
    def model(self):
        return nn.Sequential({first}nn.Linear(3, 2))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="{reduction}")
"""


EVALUATE = """{}
    def evaluate(self, model, batches):
        {}
        return {}
"""


def own(here: Path, body: str = "pass", first: str = "", reduction: str = "none") -> None:
    text = MINE.replace("{body}", body).replace("{first}", first).replace("{reduction}", reduction)
    (here / "mine.py").write_text(text)


@pytest.mark.parametrize(
    ("body", "reduction", "words"),
    [
        ("metric = 'f1'", "none", "give f1 too, which is the metric"),
        pytest.param("pass", "mean", "give one per sample", marks=pytest.mark.soak),
        ("class Config:\n        width: int", "none", "Mine.Config.width has no default"),
    ],
)
def test_a_mistake_in_the_class_is_one_line(
    here: Path, capsys: Any, body: str, reduction: str, words: str
) -> None:
    own(here, body, reduction=reduction)
    assert command(["train", "mine:Mine", *FAST[1:]]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert words in err[-1]
    assert "Traceback" not in "".join(err)


def test_the_mean_loss_of_batches_counts_their_rows(here: Path) -> None:
    """The last batch has two rows of six, and its mean is no larger than they are."""
    own(here, "indivisible = True", reduction="mean")
    job: Any = registry.load("mine:Mine")()
    rows = job.data("validation")
    model = job.model()
    whole = job.loss(model, job.collate(rows[:6])).item()
    parts = [job.collate(rows[:4]), job.collate(rows[4:6])]
    with torch.no_grad():
        assert job.evaluate(model, parts)["loss"] == pytest.approx(whole, rel=1e-6)
    odd = [[*parts[0], torch.zeros(3)], [*parts[1], torch.zeros(3)]]  # no visible number of rows
    means = [job.loss(model, part).item() for part in odd]
    with torch.no_grad():
        assert job.evaluate(model, odd)["loss"] == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size = 1 / 0", "cannot import mine (ZeroDivisionError: division by zero); fix line 4"),
        ("raise SystemExit(3)", "cannot import mine (SystemExit: 3)"),
        (
            "from . import images",
            "no known parent package); run it from the folder above the package",
        ),
        (
            "class Mine(trainfit.Job): pass\ntrainfit.train(Mine)",
            "mine calls trainfit while it is imported; put the call under if __name__",
        ),
        ("trainfit.tunable(1.0, low=2.0, high=1.0)", "tunable goes from 2.0 to 1.0"),
    ],
)
def test_a_file_that_fails_is_one_line_with_its_number(
    here: Path, capsys: Any, text: str, words: str
) -> None:
    (here / "mine.py").write_text(f"import trainfit\n\n\n{text}\n")
    assert command(["plan", "mine:Mine"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "class Config:\n        sizes: list = [16, 8]",
            "Mine.Config.sizes is a list; use a tuple",
        ),
        ("def __init__(self): self.x = 1", "define __init__(self, config)"),
        ("class Config:\n        lr = 0.1", "Mine.Config.lr has no type, so that it would be"),
        ("metric = 5", "Mine.metric is 5; give the name of a figure"),
        (
            "class Config:\n        n: int = trainfit.tunable(8, low=4, high=64, log=True)",
            "Mine.Config.n is a whole number, tunable with log; give choices",
        ),
        ("def evaluate(self, model): return {}", "define evaluate(self, model, batches)"),
    ],
)
def test_a_class_that_cannot_be_registered_is_one_line(
    here: Path, capsys: Any, body: str, words: str
) -> None:
    own(here, body)
    assert command(["plan", "mine:Mine"]) == 2
    assert words in capsys.readouterr().err


GOOD = torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (3.0, "loss gives a float"),
        (None, "loss gives a NoneType"),
        (GOOD.sum(), "one number for the whole batch"),
        (GOOD.detach(), "depends on no weight"),
        (GOOD[:3] * 2, "loss gives 3 values for 4 samples"),
        (GOOD.repeat(2), "loss gives 8 values for 4 samples"),
    ],
)
def test_a_loss_is_one_number_per_sample(losses: Any, words: str) -> None:
    counted = torch.ones(4, dtype=torch.bool)
    with pytest.raises(BadInput, match=words):
        summed(losses, counted, False)
    assert float(summed(GOOD * 2, counted, False).detach()) == 8.0
    assert float(summed(GOOD * 2, torch.arange(4) < 1, False).detach()) == 2.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "evaluate gives a NoneType"),
        ({"loss": "good"}, "evaluate gives 'good' for loss; give a number"),
        ({"loss": torch.ones(2)}, "for loss; give a number"),
    ],
)
def test_evaluate_gives_numbers(here: Path, given: Any, words: str) -> None:
    own(here)
    prepared = prepare(compose_own("mine:Mine"))
    type(prepared.job).evaluate = lambda *_: given
    task = OwnTask(prepared, prepared.job.model, 4)
    with pytest.raises(BadInput, match=words):
        task.evaluate(prepared.job.model(), 4)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("return open('/nowhere/data.pt')", 1, "FileNotFoundError: [Errno 2] No such file"),
        ("return iter([1, 2])", 2, "data('train') gives a list_iterator, which has no len()"),
        (
            "return {'x': torch.ones(8, 3)}",
            2,
            "data('train') gives a dict, which has no len() or no [0]",
        ),
        ("return torch.utils.data.DataLoader([1])", 2, "gives a DataLoader, which has no len() or"),
        ("return [] if split == 'test' else [1]", 2, "data('test') gives no samples"),
    ],
)
def test_data_that_cannot_be_read_is_one_line(
    here: Path, capsys: Any, body: str, code: int, words: str
) -> None:
    own(here)
    text = (here / "mine.py").read_text().replace("return [(torch", f"{body}\n        [(torch")
    (here / "mine.py").write_text(text)
    assert command(["plan", "mine:Mine"]) == code
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in err
    assert "internal error" not in err
    assert code == 2 or "look at line 7 of mine.py" in err


def test_an_override_does_not_stay_for_the_next_call(here: Path) -> None:
    assert compose_own("images:Images", "width=5").config.job.width == 5
    assert compose_own("images:Images").config.job.width == 16


SGD = """def optimizer(self, model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        {more}
        return made
"""


def test_the_jobs_own_optimizer_is_tuned_and_no_other(here: Path) -> None:
    own(here, SGD.replace("{more}", "pass"))
    prepared = prepare(compose_own("mine:Mine"))
    assert "optimizer" in prepared.question().pins
    setup = own_steps.own_trial(
        make_plan(**dict.fromkeys(("batch_size", "effective_batch_size"), 4), packed=False),
        task="mine:Mine",
        config=codec.encode(prepared.config),
    )
    made = setup.more["make_optimizer"](prepared.job.model())
    assert type(made) is torch.optim.SGD


def test_a_scheduler_of_torch_is_refused_by_its_name(here: Path, capsys: Any) -> None:
    own(here, SGD.replace("{more}", "torch.optim.lr_scheduler.StepLR(made, 1)"))
    assert command(["train", "mine:Mine", *FAST[1:]]) == 2
    assert "SGD has a scheduler of torch, but the loop sets its rate" in capsys.readouterr().err


@pytest.mark.soak
def test_a_step_that_cannot_be_simulated_is_trained(here: Path) -> None:
    own(here)
    text = (here / "mine.py").read_text()
    said = "torch.unique(batch[0])\n        return nn.functional"
    (here / "mine.py").write_text(text.replace("return nn.functional", said))
    with pytest.raises(RunFailed, match=r"unique.* gives no shape without values"):
        trainfit.plan("mine:Mine", gpu="t4")
    with pytest.warns(TrainfitWarning, match="memory and time are not predicted"):
        result = trainfit.train("mine:Mine", *FAST[1:], "training.num_epochs=1")
    assert result.status == "finished"


_PRETRAINED = """
import torch, trainfit, transformers

class {name}(trainfit.Job):
    def data(self, split):
        return [(torch.ones(64, dtype=torch.long), torch.tensor(1))] * 64

    def model(self):
        kind = transformers.BertForSequenceClassification
        return {model}

    def loss(self, model, batch):
        logits = model(input_ids=batch[0]).logits
        return torch.nn.functional.cross_entropy(logits, batch[1], reduction="none")
"""


@pytest.mark.soak
def test_a_pretrained_model_is_planned_as_it_is_trained_with_dropout(here: Path) -> None:
    place = write_bert(here, layers=2, width=32, hidden_dropout_prob=0.3)
    loaded = f"kind.from_pretrained({place!r})"
    built = f"kind(transformers.BertConfig.from_pretrained({place!r}))"
    pages = (
        _PRETRAINED.format(name="Loaded", model=loaded),
        _PRETRAINED.format(name="Built", model=built),
    )
    (here / "mine.py").write_text("".join(pages))
    plans = [trainfit.plan(f"mine:{name}", gpu="t4") for name in ("Loaded", "Built")]
    assert plans[0].memory is not None
    assert plans[0].memory == plans[1].memory


@pytest.mark.soak
def test_a_plan_asks_the_hub_for_no_weights(here: Path) -> None:
    (place := here / "hub" / "anna" / "tiny").mkdir(parents=True)
    write_bert(place, layers=1, width=32)
    (place / "model.safetensors").write_bytes(b"weights")
    load = 'kind.from_pretrained("anna/tiny")'
    (here / "mine.py").write_text(_PRETRAINED.format(name="Mine", model=load))
    with hub(here / "hub") as (url, asked):
        words = [sys.executable, "-m", "trainfit", "plan", "mine:Mine", "--gpu", "t4"]
        env = environment(url, here / "home", PYTHONPATH=str(Path(trainfit.__file__).parents[1]))
        done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert any(path.endswith("config.json") for path in asked)
    assert not any("model.safetensors" in path or ".bin" in path for path in asked)


_LATE = """
import torch, trainfit

class Mine(trainfit.Job):
    def data(self, split):
        return [torch.ones(3)] * 8
    def model(self):
        from transformers import AutoModel
        return torch.nn.ModuleList([AutoModel.from_pretrained({place!r}), torch.nn.BatchNorm1d(3)])
"""


def test_a_model_is_known_without_its_pretrained_weights(here: Path) -> None:
    """There is no file of weights: transformers' own from_pretrained would fail."""
    place = write_bert(here, layers=1, width=32)
    (here / "mine.py").write_text(_LATE.format(place=place))
    registry.load("mine:Mine")
    assert "BatchNorm" in str(prepare(compose("mine:Mine", [])).indivisible)


@pytest.mark.parametrize("late", [False, True])
def test_a_model_is_known_without_weights_of_the_hub(
    late: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's constructors load so, by a name that they imported from torch.hub."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.hub, "urlopen", lambda *given, **_: asked.append(given))
    own(here, "pass", first="__import__('mine_vision').norm(), ")
    loaded = "load_state_dict_from_url('http://127.0.0.1/' + name)"
    take = f"    state = {loaded}['model']\n    state.pop('head', None)\n"
    text = "import torch\nfrom torch.hub import load_state_dict_from_url\n"
    text += "def norm(name='norm.pth'):\n    made = torch.nn.BatchNorm1d(3)\n" + take
    text += "    made.load_state_dict({key: state[key] for key in state})\n    return made\n"
    (here / "mine_vision.py").write_text(text)
    fetch, load = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict
    registry.load("mine:Mine")
    if not late:
        importlib.import_module("mine_vision")
    try:
        assert "BatchNorm" in str(prepare(compose("mine:Mine", [])).indivisible)
    finally:
        imported = sys.modules.pop("mine_vision")
    assert not asked
    assert imported.load_state_dict_from_url is fetch
    assert torch.hub.load_state_dict_from_url is fetch
    assert torch.nn.Module.load_state_dict is load


def test_what_a_constructor_imports_outlives_the_planning(here: Path) -> None:
    """transformers keeps the functions of torch.nn.init that it finds when it is imported."""
    own(here, "pass", first="__import__('mine_late').layer(), ")
    late = "import torch\nfrom torch.nn.init import normal_\nSCALE = torch.tensor([2.0, 3.0])\n"
    seeded = "    with torch.random.fork_rng():\n        return torch.nn.Linear(3, 3)\n"
    (here / "mine_late.py").write_text(f"{late}def layer():\n{seeded}")
    registry.load("mine:Mine")
    built = prepare(compose("mine:Mine", [])).built
    imported = sys.modules.pop("mine_late")
    assert all(weight.is_meta for weight in built.parameters())
    assert imported.SCALE.tolist() == [2.0, 3.0]
    assert imported.normal_(torch.zeros(100)).std() > 0.5
    assert not hasattr(torch, "meta")


def test_a_job_is_a_name_or_a_class() -> None:
    with pytest.raises(BadInput, match="the job is 3; give its name"):
        trainfit.plan(3)  # type: ignore[arg-type]


def test_answers_with_tensors_are_plain_values(here: Path) -> None:
    given = {"a": torch.tensor([1.0, 2.0]), "b": (np.float32(0.5), np.arange(2)), 3: None}
    assert own_steps._plain(given) == {"a": [1.0, 2.0], "b": [0.5, [0, 1]], "3": None}
    with pytest.raises(BadInput, match="predict gives a object"):
        own_steps._plain([object()])


def test_items_of_a_jsonl_file_may_be_any_json(here: Path) -> None:
    path = here / "items.jsonl"
    path.write_text('[1, 2]\n\n{"x": 3}\n"word"\n')
    assert read_items(path, "auto") == [[1, 2], {"x": 3}, "word"]
    path.write_text('{"text": "[1, 2]"}\n')
    assert read_items(path, "auto") == [[1, 2]]
    path.write_text("[1, 2]\n{broken\n")
    with pytest.raises(BadInput, match="row 2 is not JSON"):
        read_items(path, "auto")
    with pytest.raises(BadInput, match="no names for columns"):
        _csv([[1, 2]])
    assert _csv([{"a": 1}, {"b": [2, 3]}]) == "a,b\n1,\n,2|3\n"


@pytest.mark.soak
def test_batch_norm_is_noticed(here: Path) -> None:
    own(here, first="nn.BatchNorm1d(3), ")
    with pytest.warns(TrainfitWarning, match="the model has BatchNorm"):
        result = trainfit.train("mine:Mine", *FAST[1:], "training.num_epochs=1")
    assert "BatchNorm" in (Path(result.run) / "train.log").read_text()


def test_a_metric_that_is_no_number_is_told(here: Path) -> None:
    own(here, EVALUATE.format("metric = 'f1'", "pass", "{'f1': float('nan')}"))
    with pytest.warns(TrainfitWarning, match="evaluate gives nan for f1"):
        trainfit.train("mine:Mine", *FAST[1:], "training.max_steps=1")


def test_what_a_job_prints_is_no_part_of_the_answer(here: Path) -> None:
    own(here, EVALUATE.format("", "print('looked')", "{'loss': 0.5}"))
    with (here / "mine.py").open("a") as file:
        file.write("print('imported')\n")
    result = CliRunner().invoke(cli, ["train", "mine:Mine", "--json", *FAST[1:]])
    assert json.loads(result.stdout)["metrics"] == {"loss": 0.5}
    assert "imported" in result.stderr
    assert "looked" in result.stderr


def test_a_norm_of_zero_does_not_clip(here: Path) -> None:
    """As for other trainers: a gradient that is clipped to nothing learns nothing."""
    registry.load("images:Images")
    prepared = prepare(compose("images:Images", ["training.max_grad_norm=0"]))
    settings = prepared.settings(0, make_plan(), torch.device("cpu"), 1)
    assert settings.optimizer.max_grad_norm is None


COMPLEX = """
import torch, trainfit

class Wave(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    def forward(self, x):
        return (torch.fft.fft(x) * self.weight).abs().sum(-1)

class Mine(trainfit.Job):
    def data(self, split):
        return torch.ones(8, 3)
    def model(self):
        return Wave()
    def loss(self, model, x):
        return model(x)
"""


def test_complex_weights_are_updated_without_fused_kernels(here: Path) -> None:
    (here / "mine.py").write_text(COMPLEX)
    result = trainfit.train("mine:Mine", *FAST[1:], "training.max_steps=2", "lr=0.1")
    assert result.metrics["loss"] < 3
    with pytest.raises(BadInput, match="complex weights, which adamw_fused does not take"):
        trainfit.train("mine:Mine", *FAST[1:], "optimization.optimizer=adamw_fused")


def test_a_method_that_is_missing_is_one_line(here: Path, capsys: Any) -> None:
    (here / "mine.py").write_text("import trainfit\nclass Mine(trainfit.Job):\n    pass\n")
    assert command(["train", "mine:Mine"]) == 2
    assert "Mine has no data; define data(self, split)" in capsys.readouterr().err


def test_the_direction_of_a_metric_follows_its_name_unless_said() -> None:
    from trainfit.jobs.registry import is_greater_better

    class Error(trainfit.Job):
        metric = "word_error"

    class Said(trainfit.Job):
        metric = "word_error"
        greater_is_better = True

    assert (is_greater_better(Error), is_greater_better(Said)) == (False, True)


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        *((name, True) for name in ("loss", "val/loss", "RMSE", "rmse@10", "error_rate", "WER")),
        *((name, False) for name in ("accuracy", "macro_f1", "R2", "lossless", "per_class_auc")),
    ],
)
def test_a_loss_or_an_error_is_known_by_the_words_of_its_name(metric: str, less: bool) -> None:
    assert registry.less_is_better(metric) == less


def test_batches_of_any_nesting_come_back_as_they_were() -> None:
    data = [{"a": torch.full((n,), n), "b": (torch.tensor(n), [torch.zeros(2, 2)])} for n in (2, 5)]

    def collate(items: list[Any]) -> Any:
        padded = nn.utils.rnn.pad_sequence([item["a"] for item in items], batch_first=True)
        rest = [torch.stack([item["b"][1][0] for item in items])]
        return {"a": padded, "b": (torch.stack([item["b"][0] for item in items]), rest)}

    shape = find_shape(collate, data, [2, 5])
    assert shape.leaves == (
        (("rows", "width"), "int64"),
        (("rows",), "int64"),
        (("rows", 2, 2), "float32"),
    )
    batch = collate(data)
    back = shape.restore(shape.flatten(batch, 2))
    assert torch.equal(back["a"], batch["a"])
    assert torch.equal(back["b"][1][0], batch["b"][1][0])
    assert shape.make(7, 3)["0"].shape == (7, 3)


def test_a_config_is_a_frozen_record_with_its_defaults() -> None:
    class Job(trainfit.Job):
        class Config:
            width: int = 3
            rate: float = trainfit.tunable(0.5, low=0.1, high=1.0)

    config = config_class(Job)()
    assert (config.width, config.rate) == (3, 0.5)
    with pytest.raises(AttributeError):
        config.width = 4


def compose_own(task: str, *words: str) -> Any:
    registry.check_job(task)
    return compose(task, list(words))


def test_a_batch_may_hold_named_tuples_and_mappings(here: Path) -> None:
    data = [Pair(torch.full((3,), float(n)), n) for n in range(4)]
    job = registry.Job()
    shape = find_shape(lambda items: UserDict(pair=job.collate(items)), data, [1] * 4)
    back = shape.restore(shape.flatten(UserDict(pair=job.collate(data)), 4))
    assert type(back["pair"]) is Pair
    assert back["pair"].y.tolist() == [0, 1, 2, 3]
    assert shape.make(7, 1)["0"].shape == (7, 3)


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"x": 1.0, "name": "a"}, r"a str as batch\['name'\]\[0\]"),
        (Path(), "default collation cannot join these samples.*define collate"),
    ],
)
def test_a_batch_that_is_not_of_tensors_is_one_line(sample: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        find_shape(registry.Job().collate, [sample] * 2, [1, 1])


def test_a_run_of_ones_own_job_asks_for_its_class(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(BadInput, match="has no exported model; finish it first"):
        exports_of(tmp_path)
    (tmp_path / "export" / "job.json").write_text("{}")
    with pytest.raises(BadInput, match="name its class: trainfit predict module:Class --run"):
        exports_of(tmp_path)


def test_a_number_of_tensors_that_varies_is_one_line() -> None:
    with pytest.raises(BadInput, match="2 tensors for one sample and 3 for two; give as many"):
        find_shape(lambda items: {"x": torch.ones(len(items)), "boxes": items}, GOOD, [1] * 4)


def test_batches_of_a_plan_have_full_masks_and_valid_indices_and_lengths() -> None:
    data = [torch.arange(n) for n in (3, 8, 5)]

    def collate(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = torch.tensor([len(item) for item in items])
        ids = nn.utils.rnn.pad_sequence(items, batch_first=True)
        shown = torch.arange(ids.shape[1]) < sizes[:, None]
        return {"ids": ids, "sizes": sizes, "mask": shown, "weights": shown.float()}

    ids, sizes, mask, weights, _ = find_shape(collate, data, [3, 8, 5]).make(4, 6).values()
    assert (ids.shape, ids.unique().tolist()) == ((4, 6), [7])
    assert sizes.tolist() == [6] * 4
    assert bool(mask.all())
    assert not bool(weights.any())


def test_a_token_or_class_that_is_by_chance_the_longest_length_is_no_length() -> None:
    """Trials have longer sequences than any sample: a token of that size is outside of a table."""
    data = [(torch.full((size,), most), most) for size, most in ((3, 4), (5, 5))]

    def collate(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
        return ids.to(torch.uint16), torch.tensor([label for _, label in items])

    ids, labels, _ = find_shape(collate, data, [3, 5]).make(2, 64).values()
    assert ids.shape == (2, 64)
    assert {*ids.long().flatten().tolist(), *labels.tolist()} == {5}


def test_samples_that_differ_are_planned_by_the_largest() -> None:
    data = [torch.zeros(n) for n in (2, 9, 4)]

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True)

    with pytest.warns(TrainfitWarning, match="differ in size.*no lengths"):
        shape = find_shape(collate, data, [1, 1, 1])
    assert shape.make(5, 1)["0"].shape == (5, 9)
    with pytest.raises(BadInput, match=r"equal size.*define collate"):
        find_shape(registry.Job().collate, data, [1, 1, 1])


AVERAGED = """
import copy
import torch
import images

class Mine(images.Images):
    def model(self):
        net = super().model()
        return torch.nn.ModuleDict({"net": net, "ema": copy.deepcopy(net).requires_grad_(False)})
    def optimizer(self, model):
        halves = model["net"][0], model["net"][-1]
        return [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    def after_step(self, model, step):
        with torch.no_grad():
            for a, b in zip(model["ema"].parameters(), model["net"].parameters()):
                a.lerp_(b, 0.2)
    def loss(self, model, batch):
        return super().loss(model["net"], batch)
    def evaluate(self, model, batches):
        weights = sum(float(p.double().abs().sum()) for p in model["ema"].parameters())
        return {"accuracy": weights}
"""


@pytest.mark.soak
def test_an_average_of_the_weights_is_saved_with_them(here: Path) -> None:
    """Two optimizers, and weights without gradients that after_step changes."""
    (here / "mine.py").write_text(AVERAGED)
    words = (*FAST[1:], "training.checkpoint_steps=4", "training.max_steps=12", "tune=off")
    whole, part = (trainfit.train("mine:Mine", *words) for _ in range(2))
    rows = [json.loads(line) for line in (Path(whole.run) / METRICS).read_text().splitlines()]
    best = max(row["accuracy"] for row in rows if "accuracy" in row)
    assert whole.metrics["accuracy"] == best  # of the exported model, as it was evaluated
    for step in Path(part.run).glob("checkpoints/*"):
        if not step.name.endswith("4"):
            shutil.rmtree(step)
    for name in ("results.json", "result.json", "export/model.safetensors"):
        (Path(part.run) / name).unlink()
    again = trainfit.train("mine:Mine", resume=part.run)
    weights = [(Path(r.run) / "export" / "model.safetensors").read_bytes() for r in (whole, again)]
    assert weights[0] == weights[1]
