"""Any optimizer of torch by name, or one of the task's own: what is asked for is what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_faults import Faults, plant
from engine_toy import Crash, CrashAt, ToyTask, final_bits, final_weights, settings
from torch import nn

from trainfit.core.errors import BadInput, OutOfMemory
from trainfit.engine import saved_state
from trainfit.engine.checkpoint import latest_good, read_state
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings, ScheduleSettings
from trainfit.engine.optimizer import Combined

KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "sgd_fused": {},
    "adam": {"amsgrad": True},
    "adamw": {"amsgrad": True},
    "adafactor": {},
    "adagrad": {"initial_accumulator_value": 0.5},
    "asgd": {},
    "nadam": {},
    "rprop": {},
    "muon": {},
}


class Rateless(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the weights."""


def chosen(task: ToyTask, kind: str, **changes: Any) -> LoopSettings:
    decay = 0.0 if kind == "rprop" else 0.1
    optimizer = {"kind": kind, "options": KINDS.get(kind, {}), "weight_decay": decay}
    return settings(task, epochs=1.0, checkpoint_steps=2, optimizer=optimizer, **changes)


OFTEN = ("sgd", "adam", "adafactor", "nadam", "muon")
KINDS_BY_TIME = [k if k in OFTEN else pytest.param(k, marks=pytest.mark.soak) for k in KINDS]


@pytest.mark.parametrize("kind", KINDS_BY_TIME)
def test_a_crash_changes_nothing_with_any_optimizer(tmp_path: Path, kind: str) -> None:
    task = ToyTask(norm=True)
    train(task, chosen(task, kind), tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(Crash):
        train(task, chosen(task, kind), run, observers=[CrashAt(3)])
    train(task, chosen(task, kind), run, resume=True)
    assert final_bits(run) == final_bits(tmp_path / "whole")
    states = [
        read_state(latest_good(folder)[0])["optimizer"] for folder in (run, tmp_path / "whole")
    ]  # type: ignore[arg-type]
    assert states[0] == states[1]
    assert states[0] is not None


def by_hand(task: ToyTask, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
    """A plain loop of torch, whole steps at a constant rate."""
    torch.manual_seed(5)
    model = task.build_model().train()
    made = optimizer(model)
    for sequences in task.steps(0)[:steps]:
        batch = task.collate(sequences, len(sequences), 12, None)
        (task.loss(model, batch) / len(sequences)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        made.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "options"), [("sgd", {"momentum": 0.9}), ("adagrad", {}), ("rmsprop", {"alpha": 0.9})]
)
def test_a_named_optimizer_trains_as_torchs_own(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    task = ToyTask(dropout=0.0)
    constant = ScheduleSettings(kind="constant")
    optimizer = {"kind": kind, "options": options, "weight_decay": 0.0}
    train(
        task, settings(task, epochs=1.0, optimizer=optimizer, schedule=constant), tmp_path / "run"
    )
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    expected = by_hand(
        ToyTask(dropout=0.0), lambda m: kinds[kind](m.parameters(), lr=0.02, **options), 5
    )
    found = final_weights(tmp_path / "run")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)


def test_an_optimizer_of_the_tasks_own_keeps_the_rates_of_its_groups(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        *rest, last = model.parameters()
        made = torch.optim.SGD([{"params": rest}, {"params": [last], "lr": 0.5}], lr=0.1)
        made.register_step_pre_hook(lambda *_: seen.append([g["lr"] for g in made.param_groups]))
        return made

    task = ToyTask()
    schedule = ScheduleSettings(kind="constant", warmup_steps=1)
    train(
        task, settings(task, epochs=1.0, schedule=schedule), tmp_path / "run", make_optimizer=make
    )
    assert seen == [[0.05, 0.25], *([[0.1, 0.5]] * 4)]


def test_a_combined_optimizer_of_ones_own_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return Combined(torch.optim.SGD([first], lr=0.1, momentum=0.5), torch.optim.Adam(rest))

    task = ToyTask()
    options = settings(task, epochs=1.0, checkpoint_steps=2)
    train(task, options, tmp_path / "whole", make_optimizer=make)
    with pytest.raises(Crash):
        train(task, options, tmp_path / "run", make_optimizer=make, observers=[CrashAt(3)])
    train(task, options, tmp_path / "run", make_optimizer=make, resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, chosen(task, "sgd"), tmp_path / "run")
    with pytest.raises(BadInput, match="another optimizer"):
        train(task, settings(task), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: torch.optim.SGD(list(model.parameters())[1:]),
            "leaves out 1 trained weights",
        ),
        (
            lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))]),
            "holds 1 weights that the model does not train",
        ),
        (lambda _: "adamw", "the optimizer is a str"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "needs a closure"),
        (lambda model: Rateless(model.parameters(), {}), "has no lr"),
    ],
)
def test_an_optimizer_must_hold_the_trained_weights(
    tmp_path: Path, make: Any, message: str
) -> None:
    task = ToyTask()
    with pytest.raises(BadInput, match=message):
        train(task, settings(task), tmp_path / "run", make_optimizer=make)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sdg"}, "no optimizer 'sdg'.*did you mean sgd"),
        ({"kind": "lbfgs"}, "no optimizer 'lbfgs'"),
        ({"kind": "sgd", "options": {"momentun": 0.9}}, "'momentun'.*did you mean momentum"),
        ({"kind": "rmsprop_fused"}, "rmsprop has no option 'fused'"),
        ({"kind": "rprop", "weight_decay": 0.1}, "rprop has no weight decay"),
        ({"options": {"lr": 3.0}}, "adamw has no option 'lr'"),
    ],
)
def test_unknown_optimizers_and_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        OptimizerSettings(learning_rate=0.1, **options)


def test_options_with_impossible_values_are_refused(tmp_path: Path) -> None:
    task = ToyTask()
    wrong = settings(task, optimizer={"kind": "sgd", "options": {"momentum": -1.0}})
    with pytest.raises(BadInput, match="momentum"):
        train(task, wrong, tmp_path / "run")


def test_options_are_saved_with_the_settings() -> None:
    made = OptimizerSettings(kind="sgd", learning_rate=0.1, options={"momentum": 0.9})
    assert OptimizerSettings.from_json(made.to_json()) == made
    hash(made)


def test_memory_that_runs_out_in_an_update_repeats_it_or_ends_the_run(tmp_path: Path) -> None:
    """Never are some of the weights updated twice."""

    def faulty(run: Path, at: set[int]) -> Faults:
        task, faults = ToyTask(), Faults(at)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, task, faults)
            train(task, chosen(task, "adam"), run)
        return faults

    updates = sorted(faulty(tmp_path / "clean", set()).phases["update"])
    ended = 0
    for number, at in enumerate(updates[: len(updates) // 4 : 20]):
        run = tmp_path / str(number)
        try:
            faulty(run, {at})
        except OutOfMemory:
            ended += 1
        else:
            assert final_bits(run) == final_bits(tmp_path / "clean")
    assert 0 < ended < len(updates[: len(updates) // 4 : 20])


def test_nested_state_comes_back_as_it_was() -> None:
    shared = torch.arange(3.0)
    state = {
        "a": [shared, (1, None, True)],
        7: {"nan": float("inf"), "b": shared, "text": "x", "": 0.1},
        "a/0": torch.ones(2, dtype=torch.int8),
    }
    tensors: dict[str, torch.Tensor] = {}
    tree = saved_state.flatten(state, "s", tensors)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    assert len(tensors) == len(set(pointers)) == 3
    back = saved_state.unflatten(tree, tensors, torch.device("cpu"))
    assert str(back) == str(state)
    with pytest.raises(BadInput, match="holds a object"):
        saved_state.flatten({"x": object()}, "s", {})
