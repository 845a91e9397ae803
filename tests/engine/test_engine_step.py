"""The step against references: torch's own optimizer, clipping and scaler, and one whole batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_faults import Faults
from engine_toy import Toy, ToyTask, cuts
from torch import nn
from torch.nn import functional

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import TaskSpec
from trainfit.data.batches import StepLoader
from trainfit.engine.loop_settings import LoaderSettings, OptimizerSettings
from trainfit.engine.optimizer import build_optimizer, parameter_groups, trained_parameters
from trainfit.engine.step import LossScale, accumulate, autocast, finish, loss_scale, plain_step
from trainfit.packing.cut_ladder import fit_padded_parts
from trainfit.packing.steps import fit_packed_parts, sample_parts
from trainfit.planning.estimator.estimate import Request, Target, ask

CPU = torch.device("cpu")
KINDS = ("adamw_fused", "adamw")


def double_task() -> ToyTask:
    return ToyTask(dtype=torch.float64, dropout=0.0, sequences=40, effective_batch=14)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_the_gradient_does_not_depend_on_the_cut(micro_batches: int, padded: bool) -> None:
    task = double_task()
    torch.manual_seed(0)
    model, step = task.build_model(), task.steps(0)[0]
    whole = task.collate(step, len(step), 12, None)
    logits = model(whole["ids"], whole["segments"], whole["count"])
    functional.cross_entropy(logits, whole["labels"]).backward()
    expected = gradients(model)
    model.zero_grad()
    lengths = np.array(task.lengths())
    parts = sample_parts(lengths, task.effective_batch, 1)
    if padded:
        cap = {1: 168, 2: 96, 7: 12}[micro_batches]
        cut = fit_padded_parts(parts, int(lengths.max()), cap, multiple=12)
    else:
        cut = fit_packed_parts(parts, max(lengths), 200, multiple=4, at_least=micro_batches)
    batches = StepLoader(task, LoaderSettings(), CPU).load(step, cut)
    assert len(batches) >= micro_batches
    loss = accumulate(model, task.loss, batches, task.weight(step), device_type="cpu")
    assert loss.item() == pytest.approx(
        functional.cross_entropy(logits, whole["labels"]).item(), rel=1e-6
    )
    assert (gradients(model) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_torch_with_clipping(kind: str) -> None:
    torch.manual_seed(0)
    ours = Toy(0.0, norm=False).double()
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(
        ours, OptimizerSettings(kind=kind, learning_rate=0.1, weight_decay=0.3)
    )
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    for scale in (100.0, 1.0, 1e-3):  # clipped, and not
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine) * scale
            other.grad = mine.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        numbers = finish(optimizer, torch.zeros(()), max_grad_norm=1.0)
        assert numbers.grad_norm.item() == pytest.approx(norm.item())
        assert all(p.grad is None for p in ours.parameters())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_the_state_made_beforehand_is_the_one_torch_would_make(fused: bool) -> None:
    model = Toy(0.0, norm=False)
    kind = "adamw_fused" if fused else "adamw"
    made = build_optimizer(model, OptimizerSettings(kind=kind, learning_rate=0.1))
    lazy = torch.optim.AdamW(model.parameters(), fused=fused, lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lazy.step()
    for parameter in model.parameters():
        ours, theirs = made.state[parameter], lazy.state[parameter]
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            assert ours[key].shape == theirs[key].shape
            assert ours[key].stride() == theirs[key].stride()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str, where: str) -> None:
    model = Toy(0.0, norm=False)
    optimizer = build_optimizer(model, OptimizerSettings(kind=kind, learning_rate=0.1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if where == "gradient":
        model.hidden.weight.grad[3, 2] = float("nan")
    loss = torch.tensor(float("inf") if where == "loss" else 1.0)
    finish(optimizer, loss, max_grad_norm=1.0)
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_may_run_out_at_any_operation_of_an_update(kind: str) -> None:
    torch.manual_seed(0)
    first = Toy(0.0, norm=False)
    grads = [torch.randn_like(p) for p in first.parameters()]

    def updated(faults: Faults, loss: float = 1.0) -> list[torch.Tensor]:
        model = copy.deepcopy(first)
        settings = OptimizerSettings(kind=kind, learning_rate=0.1, weight_decay=0.2)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, settings)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        total, scale = torch.tensor(loss), LossScale("cpu")
        with faults:
            finish(optimizer, total, max_grad_norm=0.5, scale=scale)
        states = [v for p in trained_parameters(optimizer) for v in optimizer.state[p].values()]
        return [*model.parameters(), *states]

    for loss in (1.0, float("nan")):
        counted = Faults()
        expected = updated(counted, loss)
        assert counted.count > 10
        for at in range(1, counted.count + 1):
            for planted in ({at}, {at, at + 2}):
                faults = Faults(planted)
                found = updated(faults, loss)
                assert faults.raised
                torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=str(planted))


def test_the_loss_scale_follows_torchs_scaler() -> None:
    ours, theirs = LossScale("cpu"), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(1))
    for at in range(4500):
        finite = at not in (0, 1, 7, 2100)
        weight.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        ours.follow(torch.tensor(finite))
        assert ours.factor.item() == theirs.get_scale(), at


def test_a_scaled_loss_gives_the_same_update() -> None:
    task = double_task()
    step = task.steps(0)[0]
    batches = StepLoader(task, LoaderSettings(), CPU).load(step, cuts(task)[1])
    found = []
    for scale in (None, LossScale("cpu")):
        torch.manual_seed(1)
        model = task.build_model()
        optimizer = build_optimizer(model, OptimizerSettings(learning_rate=0.1))
        numbers = plain_step(
            model, optimizer, task.loss, batches, 14.0,
            device_type="cpu", max_grad_norm=0.01, scale=scale,
        )  # fmt: skip
        found.append((numbers.grad_norm, [*model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_only_fp16_is_scaled_and_fp32_is_not_cast() -> None:
    assert loss_scale("bf16", "cpu") is None
    assert loss_scale("fp32", "cpu") is None
    assert loss_scale("fp16", "cpu") is not None
    with autocast("cpu", "fp32"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu", "bf16"):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_trained_weights_of_16_bits_keep_small_updates() -> None:
    model = nn.Linear(4, 4).bfloat16()
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=1e-5))
    assert model.weight.dtype == torch.float32
    assert model.bias.dtype == torch.bfloat16
    before = model.weight.detach().clone()
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        finish(optimizer, torch.zeros(()))
    torch.testing.assert_close(before - model.weight, torch.full((4, 4), 3e-5), rtol=0.02, atol=0)


def test_biases_norms_and_if_so_wished_embeddings_do_not_decay() -> None:
    model = Toy(0.0, norm=True)
    names = {id(p): name for name, p in model.named_parameters()}

    def decayed(**options: Any) -> set[str]:
        groups = parameter_groups(model, 0.1, **options)
        assert sorted(g["weight_decay"] for g in groups) == [0.0, 0.1]
        return {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}

    matrices = {"hidden.weight", "head.weight", "unused.weight"}
    assert decayed() == {"embedding.weight", *matrices}
    assert decayed(decay_embeddings=False) == matrices


def test_a_model_without_trained_weights_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadInput, match="no weight that is trained"):
        build_optimizer(model, OptimizerSettings(learning_rate=0.1))


def fake_step(kind: Any, precision: Any) -> tuple[nn.Module, Any]:
    """What the planner's child builds and runs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 2))

    def make_step(built: nn.Module) -> Any:
        optimizer = build_optimizer(built, OptimizerSettings(kind=kind, learning_rate=0.1))
        batches = [{"x": torch.zeros(4, 64)}, {"x": torch.zeros(4, 64)}]
        scale = loss_scale(precision, "cpu")

        def step() -> None:
            plain_step(
                built, optimizer, lambda m, b: m(b["x"]).float().sum(), batches, 8.0,
                device_type="cpu", precision=precision, max_grad_norm=1.0, scale=scale,
            )  # fmt: skip

        return step

    return model, make_step


def test_the_planner_runs_the_step_on_fake_tensors() -> None:
    asked = [(kind, precision) for kind in KINDS for precision in ("fp32", "bf16", "fp16")]
    requests = [
        Request(
            task=TaskSpec(
                factory="test_engine_step:fake_step",
                arguments={"kind": kind, "precision": precision},
            ),
            targets=(Target(sm_count=40, compute_capability="7.5", capacity=16 << 30),),
        )
        for kind, precision in asked
    ]
    for case, answer in zip(asked, ask(requests), strict=True):
        assert answer.error is None, case
        assert answer.unknown == {}, case
        assert answer.gradients == 4 * (64 * 64 + 64 + 64 * 2 + 2), case
