"""`trainfit run` makes a script faster that knows nothing of trainfit, with the same losses."""

from __future__ import annotations

import gc
import importlib
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stand_in import run_again
from torch import nn
from unpadded_tiny import batch, config, counting_packed

import trainfit
from trainfit.cli.main import run
from trainfit.integrations import script_hooks
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.host_batches import AROUND, Switch
from trainfit.integrations.script_hooks import SpeedUp
from trainfit.integrations.speeding import apply_speedups, facts_in
from trainfit.integrations.turns import GRAPHS, Turns
from trainfit.runtime import compile_blocks

SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
torch.set_num_threads(1)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(BertConfig(vocab_size=90, **sizes, **off))
rows = []
for length in (3, 9, 5, 12, 1, 7, 8, 2):
    mask = (torch.arange(12) < length).long()
    ids = torch.randint(1, 90, (12,)) * mask
    rows.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(length % 2)})
options = dict(report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=1)
arguments = TrainingArguments(
    sys.argv[1], max_steps=3, logging_steps=1, per_device_train_batch_size=4, **options
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
LOSSES = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print("losses", *LOSSES)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.soak
def test_a_script_is_faster_with_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(tmp_path / "out"), "7"]
    assert run(["run", "--", *words]) == 7
    out, err = capfd.readouterr()
    [line] = [line for line in out.splitlines() if line.startswith("losses")]
    [said] = [line for line in err.splitlines() if line.startswith("trainfit:")]
    assert "BertForSequenceClassification without padding; " in said
    assert "in 3 of 3 batches" in said
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "out"), "0"])
    names: dict[str, Any] = {}
    with pytest.raises(SystemExit):
        exec(compile(SCRIPT, "train.py", "exec"), names)
    assert [float(word) for word in line.split()[1:]] == pytest.approx(names["LOSSES"], abs=1e-4)


@pytest.mark.parametrize("before", [["env", "PYTHONPATH=/"], ["env"]])
def test_a_command_that_leaves_the_path_out_is_told_so(
    before: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "--", *before, sys.executable, "-c", "pass"]) == 0
    said = capfd.readouterr().err
    assert ("end it with :$PYTHONPATH" in said) == (len(before) == 2)
    assert ("no training of a known trainer" in said) == (len(before) == 1)


def test_wrong_words_are_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([], "give --"),
        (["--"], "give --"),
        (["--only", "fast", "--", "true"], "choose unpadded"),
        (["--only", "fused", "--without", "fused", "--", "true"], "every speed-up is left out"),
        (["python", "train.py"], "'python' is not after --; give -- before the command"),
        (["--", "no-such-program"], "give a command after --"),
    ):
        assert run(["run", *words]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert said in err
    assert run(["run", "--", sys.executable, "-c", "raise SystemExit(5)"]) == 5
    assert "no training of a known trainer" in capfd.readouterr().err


# ── the hooks ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(script_hooks, "_reports", [])
    monkeypatch.setattr(script_hooks, "_turns", None)
    monkeypatch.setattr(script_hooks, "_earlier", [])
    monkeypatch.setattr(script_hooks.atexit, "register", lambda *_: None)
    monkeypatch.setenv("TRAINFIT_SPEED_UP_NAMES", "unpadded,fused")
    yield
    if script_hooks._turns is not None:
        script_hooks._turns.pause()


def classifier(**others: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config("bert", **others)).eval()


class Loop:
    """Stands for the class of another library."""

    def prepare(self, *parts: Any) -> tuple[Any, ...]:
        return parts

    def fit(self, model: Any, loader: Any = None) -> tuple[Any, Any]:
        return model, loader


class Lit(nn.Module):
    """Stands for a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        ("accelerate.accelerator", "Accelerator", "prepare"),
        ("lightning.pytorch.trainer.trainer", "Trainer", "fit"),
    ],
)
@pytest.mark.usefixtures("hooked")
def test_loops_of_other_libraries_are_hooked(
    module: str, name: str, method: str, tmp_path: Path
) -> None:
    kind: Any = type(name, (Loop,), {})
    script_hooks.hook(SimpleNamespace(__name__=module, **{name: kind}), tmp_path)
    model, other = Lit(), object()
    assert getattr(kind(), method)(model, other) == (model, other)
    getattr(kind(), method)(model, other)  # once more changes nothing
    with counting_packed() as packed:
        model.inner(**batch("bert"))
    assert packed
    script_hooks._report(tmp_path)
    told = SpeedUp.load(next(tmp_path.glob("*.json")))
    assert told.done == ("Lit without padding",)
    assert (told.packed, told.own, told.real) == (1, 0, packed[0])
    assert "43% of the tokens were padding" in told.line()


@pytest.mark.usefixtures("hooked")
def test_a_model_of_another_kind_has_turns_of_its_own(tmp_path: Path) -> None:
    kind: Any = type("Trainer", (Loop,), {})
    name = "lightning.pytorch.trainer.trainer"
    script_hooks.hook(SimpleNamespace(__name__=name, Trainer=kind), tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def train(model: Any, steps: int) -> Turns:
        kind().fit(model)
        for _ in range(steps):
            optimizer.step()
        return script_hooks._turns  # type: ignore[no-any-return]

    small, large = classifier(), nn.Sequential(classifier(), nn.Linear(2, 2))
    first = train(small, 15)  # ends in the turns
    [facts] = facts_in(small)
    second = train(large, 7)
    assert (first.steps.total(), second.steps.total()) == (15, 7)
    assert not facts.off
    assert not AROUND.off
    assert train(small, 2) is first
    assert train(torch.compile(small, backend="eager"), 2) is first  # its own kind in a wrapper
    assert train(large, 1) is second
    assert (first.steps.total(), second.steps.total()) == (19, 8)


@pytest.mark.usefixtures("hooked")
def test_graphs_that_never_ran_are_told_with_the_reason(tmp_path: Path) -> None:
    def told(model: Any) -> str:
        model(**batch("bert")).logits.sum().backward()
        script_hooks._reports[:] = [
            script_hooks._taken(model, SpeedUp(done=("Bert", "CUDA graphs")))
        ]
        script_hooks._report(tmp_path)
        return SpeedUp.load(next(tmp_path.glob("*.json"))).line()

    models = [trainfit.unpadded(classifier()).train() for _ in range(2)]
    for model in models:
        [facts] = facts_in(model)
        facts.graphs = BodyGraphs(run_again)
    models[1].gradient_checkpointing_enable()
    assert "not CUDA graphs (no size came twice)" in told(models[0])
    assert "1 of them were replayed as CUDA graphs" in told(models[0])
    assert "not CUDA graphs (" in (line := told(models[1]))
    assert "Bert, CUDA graphs" not in line


@pytest.mark.parametrize("name", list(script_hooks._METHODS))
def test_the_hooked_methods_are_there(name: str) -> None:
    kind, method = script_hooks._METHODS[name]
    assert callable(getattr(getattr(importlib.import_module(name), kind), method))


# ── the turns ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("with_padding", "times"), [(3.0, 3.0), (1.0, 1.0), (0.5, 0.5)])
def test_steps_are_timed_in_turns_and_the_faster_way_stays(
    with_padding: float, times: float
) -> None:
    model = trainfit.unpadded(classifier())
    [facts] = facts_in(model)
    now, padded = 0.0, 0
    turns = Turns(clock=lambda: now)
    turns.facts.add(facts)
    for _ in range(80):
        with counting_packed() as packed:
            model(**batch("bert"))
        now += 1.0 if packed else with_padding
        padded += not packed
        turns.stepped()
    assert turns.gain is not None
    assert turns.gain.times == pytest.approx(times)
    assert turns.gain.steps == (16 if times == 1 else 8)  # ways that are far apart take few turns
    assert padded == {3.0: 6, 1.0: 12, 0.5: 80 - 10 - 6}[times]  # with padding, where it is faster
    assert turns.saved() == pytest.approx((80 - padded) * (with_padding - 1.0))
    found = SpeedUp(done=("Bert without padding",), times=times).line()
    assert f"{times:.2f} times as fast as your script alone (±0.00)" in found
    assert ("all later steps had padding" in found) is (times < 1)


@pytest.mark.parametrize(("with_graphs", "added"), [(0.5, 2.0), (2.0, 0.5)])
def test_graphs_are_timed_apart(with_graphs: float, added: float) -> None:
    model = trainfit.unpadded(classifier()).train()
    [facts] = facts_in(model)
    facts.graphs = graphs = BodyGraphs(run_again)
    now, turns = 0.0, Turns(clock=lambda: now)
    turns.facts.add(facts)
    for at in range(120):
        before = graphs.replayed, graphs.eager
        with counting_packed() as packed:
            # From time to time a size is new, which takes long once and is not counted.
            lengths = (5, 11, 1, 8) if at % 7 else (at, at + 40)
            model(**batch("bert", lengths=lengths)).logits.sum().backward()
        now += with_graphs if graphs.replayed > before[0] else 1.0 if packed else 3.0
        now += 50.0 * (graphs.eager > before[1])
        turns.stepped()
    assert turns.gain is not None
    assert turns.alone is not None
    assert turns.added is not None
    assert turns.alone.times == pytest.approx(3.0)
    assert turns.added.times == pytest.approx(added)
    assert turns.gain.times == pytest.approx(6.0 if added > 1 else 3.0)
    assert graphs.off is (added < 1)
    assert not facts.off
    line = SpeedUp(times=turns.gain.times, alone=3.0, added=added).line()
    assert f"3.00 times by unpadding alone, {added:.2f} by graphs on top" in line
    assert line.endswith("times as fast as your script alone (±0.00), same losses")


def test_a_way_that_is_clearly_slower_gets_no_more_turns() -> None:
    model = trainfit.unpadded(classifier()).train()
    [facts] = facts_in(model)
    facts.graphs = BodyGraphs()
    now, ways = 0.0, []
    turns = Turns(clock=lambda: now)
    turns.facts.add(facts)
    for _ in range(60):
        ways.append(turns._current)
        now += {0: 3.0, 1: 1.05, 2: 1.0}[turns._current]
        turns.stepped()
    assert ways[20:32:3] == [GRAPHS, 1, 0, 0]  # the way that is expected to be fastest comes first
    assert ways.count(0) == 6
    assert ways.count(1) == 12  # 5% are not clear, so that all of its turns are timed
    assert ways[-1] == GRAPHS


def test_the_whole_script_is_told_beside_its_steps() -> None:
    line = SpeedUp(done=("Bert",), times=1.7, whole=1.41).line()
    assert line.endswith(
        "1.70 times as fast as your script alone (±0.00), same losses; the whole script 1.41 times"
    )


def test_turns_go_on_while_new_sizes_are_captured() -> None:
    model = trainfit.unpadded(classifier()).train()
    [facts] = facts_in(model)
    facts.graphs = graphs = BodyGraphs()
    now, turns = 0.0, Turns(clock=lambda: now)
    turns.facts.add(facts)
    for at in range(160):
        way = turns._current
        now += {0: 3.0, 1: 4.0, 2: 1.0}[way]
        if way == GRAPHS and at < 70:  # in each of their turns so far
            graphs.captured += 1
        turns.stepped()
    assert turns.gain is not None
    assert turns.gain.times == pytest.approx(3.0)
    assert turns.alone is not None
    assert turns.alone.times == pytest.approx(0.75)
    assert not graphs.off


@pytest.mark.parametrize("sizes_come", ["always new", "never"])
def test_unpadding_that_is_a_bit_slower_is_left(sizes_come: str) -> None:
    model = trainfit.unpadded(classifier()).train()
    [facts] = facts_in(model)
    facts.graphs = graphs = BodyGraphs()
    now, turns = 0.0, Turns(clock=lambda: now)
    turns.facts.add(facts)
    for at in range(260):
        jitter = 0.2 * (at % 7)
        now += jitter + {0: 3.0, 1: 3.1, 2: 3.1}[turns._current]
        graphs.eager += sizes_come == "always new"
        turns.stepped()
    assert turns.gain is not None
    assert turns.gain.times < 1 < turns.gain.times + 3 * turns.gain.error
    assert facts.off


class Loop4:
    """A training whose steps take the time of the way that they go."""

    def __init__(
        self, compiled: float, left: int | None, step: float = 10.0, **others: Any
    ) -> None:
        self.model = trainfit.unpadded(classifier(**others)).train()
        [self.facts] = facts_in(self.model)
        self.graphs = self.facts.graphs = BodyGraphs(run_again, blocks=BodyBlocks("eager"))
        self.blocks = self.graphs.blocks
        self.now, self.times = 0.0, {"padded": 3.0 * step, "plain": 2 * step, "graphs": step}
        self.times["compiled"] = compiled * step
        self.ways: list[str] = []
        self.ready = True
        self.turns = Turns(clock=lambda: self.now, switch=Switch(), compilers=lambda: self.ready)
        self.turns.facts.add(self.facts)
        self.turns._switch(GRAPHS)
        self.turns.left = lambda: left

    def run(self, steps: int) -> None:
        for _ in range(steps):
            before = self.graphs.replayed
            with counting_packed() as packed:
                self.model(**batch("bert")).logits.sum().backward()
            replayed = self.graphs.replayed > before
            way = "graphs" if replayed else "plain" if packed else "padded"
            if replayed and self.blocks is not None and self.blocks.on:
                way = "compiled"
            self.ways.append(way)
            self.now += self.times[way]
            self.turns.stepped()


@pytest.mark.parametrize(("compiled", "stays"), [(0.5, True), (2.0, False)])
def test_compiled_blocks_are_timed_last_and_the_faster_way_stays(
    compiled: float, stays: bool
) -> None:
    loop = Loop4(compiled, left=1000)
    loop.run(150)
    first = loop.ways.index("compiled")
    assert first >= 20 + 18  # after the turns of the other ways
    assert loop.turns.compiled is not None
    assert loop.turns.compiled.times == pytest.approx(1 / compiled)
    assert loop.turns.gain is not None
    assert loop.turns.gain.times == pytest.approx(6.0 if stays else 3.0)
    assert loop.ways[-1] == ("compiled" if stays else "graphs")
    line = SpeedUp(times=2.0, alone=1.1, added=1.5, compiled=1 / compiled).line()
    assert f"1.50 by graphs on top, {1 / compiled:.2f} by compiling on top" in line
    assert ("left out later" in line) is not stays


def test_a_training_that_is_too_short_is_not_compiled() -> None:
    loop = Loop4(0.5, left=5)
    loop.run(150)
    assert "compiled" not in loop.ways
    assert loop.turns.uncompiled == "the 50 s that were left are too short for it"


@pytest.mark.parametrize(
    ("family", "cores", "steps", "step", "compiled"),
    [
        # Steps that were left, and seconds of a step with graphs, of scripts on an H200.
        ("bert", 16, 1462, 0.0309, True),
        ("bert", 16, 962, 0.0309, False),  # 1.68 times as fast without, and no faster with it
        ("bert", 2, 1462, 0.0309, False),
        ("modernbert", 16, 962, 0.0595, True),  # took 20 s of 1,500 steps, and saved 47% of each
        ("modernbert", 16, 500, 0.0595, False),
    ],
)
def test_compiling_is_weighed_by_the_cores_and_the_family(
    family: str,
    cores: int,
    steps: int,
    step: float,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainfit.integrations.turns.allowed_by_affinity", lambda: cores)
    loop = Loop4(0.5, left=steps, step=step)
    loop.facts.family = family
    loop.run(60)
    assert ("compiled" in loop.ways) is compiled


def test_a_model_that_was_compiled_before_costs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short training is not compiled, and is once a longer one has compiled its model here."""
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    kept = tmp_path / "torch" / "fxgraph"
    kept.mkdir(parents=True)
    weighed = "trainfit.integrations.turns.family_compiling"
    monkeypatch.setattr(weighed, lambda *_: (15.0, 0.5))
    stand_in = partial(compile_blocks, backend="eager")
    monkeypatch.setattr(
        "trainfit.integrations.body_state.compile_blocks",
        lambda body, backend, **rest: stand_in(body, **rest),
    )

    def compiles(left: int, **others: Any) -> bool:
        loop = Loop4(0.5, left=left, step=1.0, **others)
        loop.blocks.backend = "inductor"
        loop.run(60)
        return "compiled" in loop.ways

    assert not compiles(15)
    assert compiles(100)
    assert compiles(15)
    assert not compiles(11)  # not even from torch's cache
    assert not compiles(15, intermediate_size=56)  # another model
    kept.rename(kept.with_name("old"))
    assert not compiles(15)
    kept.mkdir()  # torch's cache was emptied since
    assert not compiles(15)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "file" / "cache"))
    assert compiles(100)  # no cache, whose warning is an error here, ends no script


def test_steps_go_on_until_the_compilers_are_ready() -> None:
    loop = Loop4(0.5, left=1000)
    loop.ready = False
    loop.run(60)
    assert "compiled" not in loop.ways
    loop.turns.left = lambda: 1  # it was found to pay before
    loop.ready = True
    loop.run(30)
    assert "compiled" in loop.ways
    before = loop.turns.saved()
    assert before is not None
    loop.turns._worth, loop.turns._compilers = True, lambda: bool(time.sleep(0.1))
    loop.turns._pays()
    after = loop.turns.saved()
    assert after is not None
    assert after <= before - 0.1  # that is no gain


def test_a_training_of_unknown_length_is_compiled_once_it_was_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighed = "trainfit.integrations.turns.family_compiling"
    monkeypatch.setattr(weighed, lambda *_: (20.0 / 1.4, 0.2))
    loop = Loop4(0.5, left=None, step=1.0)
    loop.run(270)
    # By then it has lasted 100 s at 1 s to a step, and may be expected to last them again.
    assert loop.ways.index("compiled") == pytest.approx(102, abs=2)
    assert loop.ways[-1] == "compiled"


def test_a_compiler_that_fails_is_told_with_the_reason() -> None:
    loop = Loop4(0.5, left=1000)
    assert loop.blocks is not None
    loop.run(50)
    loop.blocks.stop("no such kernel")
    loop.run(60)
    assert loop.turns.uncompiled == "no such kernel"
    assert loop.turns.compiled is None
    assert loop.ways[-1] == "graphs"


@pytest.mark.usefixtures("hooked")
def test_the_closing_line_says_why_blocks_were_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop4(0.5, left=5)
    loop.run(90)
    monkeypatch.setattr(script_hooks, "_turns", loop.turns)
    done = ("Bert", "CUDA graphs", "compiled blocks")
    script_hooks._reports[:] = [script_hooks._taken(loop.model, SpeedUp(done=done))]
    script_hooks._report(tmp_path)
    line = SpeedUp.load(next(tmp_path.glob("*.json"))).line()
    assert "Bert, CUDA graphs; " in line
    assert "not compiled blocks (the 50 s that were left are too short for it)" in line


def test_steps_that_are_left_are_known_of_trainers() -> None:
    state = SimpleNamespace(max_steps=30, global_step=12)
    assert script_hooks.steps_left(SimpleNamespace(state=state)) == 18
    state.max_steps = -1
    assert script_hooks.steps_left(SimpleNamespace(state=state)) is None
    lightning = SimpleNamespace(estimated_stepping_batches=50, global_step=8)
    assert script_hooks.steps_left(lightning) == 42
    lightning.estimated_stepping_batches = float("inf")
    assert script_hooks.steps_left(lightning) is None
    assert script_hooks.steps_left(object()) is None


def test_a_training_that_is_too_short_is_not_measured() -> None:
    turns = Turns(clock=lambda: 0.0)
    for _ in range(20):
        turns.stepped()
    assert turns.gain is None


@pytest.mark.usefixtures("hooked")
def test_models_of_earlier_folds_are_freed(tmp_path: Path) -> None:
    kind: Any = type("Trainer", (Loop,), {"train": lambda self: self.model(**batch("bert")).logits})
    script_hooks.hook(SimpleNamespace(__name__="transformers.trainer", Trainer=kind), tmp_path)
    turns, kept = Turns(), []
    for _ in range(2):
        trainer = kind()
        trainer.model = classifier()
        trainer.train()
        turns.facts.update(facts_in(trainer.model))
        kept.append(weakref.ref(trainer.model))
        del trainer
        gc.collect()
    assert [one() for one in kept] == [None, None]
    assert not turns.facts
    # Their batches are told all the same, also by a process that is killed at its end.
    assert SpeedUp.load(next(tmp_path.glob("*.json"))).packed == 2


def test_batches_of_turns_with_padding_are_counted() -> None:
    model = trainfit.unpadded(classifier())
    [facts] = facts_in(model)
    for off in (False, True):
        facts.off = off
        model(**batch("bert"))
    assert (facts.tally.packed, facts.tally.own_way) == (1, 1)


def test_a_model_with_hooks_of_the_script_keeps_its_rows() -> None:
    model = classifier()
    seen = []
    layer = model.bert.encoder.layer[0]
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    assert "a hook on BertLayer would see packed rows" in apply_speedups(model, ["unpadded"]).line()
    assert not facts_in(model)
    model(**(given := batch("bert")))
    assert seen[0][:2] == given["input_ids"].shape
    handle.remove()
    handle = model.bert.register_forward_hook(lambda _m, _i, out: seen.append(out[0].shape))
    assert "a hook on BertModel would see" in apply_speedups(model, ["unpadded"]).line()
    handle.remove()
    model.register_forward_hook(lambda _m, _i, out: seen.append(out.logits.shape))
    assert "without padding" in apply_speedups(model, ["unpadded"]).done[0]
    model(**given)
    assert seen[1] == (4, 3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGUSR1, 9)])
def test_a_signal_reaches_the_script(number: int, code: int, tmp_path: Path) -> None:
    script = (
        "import os, time, pathlib, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))"
    )
    script += "; pathlib.Path('begun').touch(); time.sleep(100)"
    words = ["-m", "trainfit", "run", "--", sys.executable, "-c", script]
    child = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.PIPE)
    while not (tmp_path / "begun").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(30) == code


@pytest.mark.usefixtures("hooked")
def test_a_dry_run_ends_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINFIT_SPEED_UP_DRY", "1")
    kind: Any = type("Trainer", (Loop,), {"train": lambda _self: 1 / 0})
    script_hooks.hook(SimpleNamespace(__name__="transformers.trainer", Trainer=kind), tmp_path)
    trainer = kind()
    trainer.model = classifier()
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 0


@pytest.mark.usefixtures("hooked")
def test_an_error_of_ours_never_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfit.integrations.speeding.unpadded", lambda _: 1 / 0)
    kind: Any = type("Trainer", (Loop,), {"train": lambda _self: "trained"})
    script_hooks.hook(SimpleNamespace(__name__="transformers.trainer", Trainer=kind), tmp_path)
    trainer = kind()
    trainer.model = classifier()
    assert trainer.train() == "trained"
    assert "ZeroDivisionError" in script_hooks._reports[0][1].line()
