"""Optimizers that take less memory: they train as AdamW does, and survive whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_faults import Faults, plant
from engine_toy import Crash, CrashAt, ToyTask, final_bits, settings
from torch import Tensor, nn

from trainfit.core.errors import BadInput, OutOfMemory
from trainfit.engine import adamw_moments, setup
from trainfit.engine.adamw_moments import HostMoments, SmallAdamW
from trainfit.engine.checkpoint import latest_good, read_tensors
from trainfit.engine.loop import Shared, train
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings
from trainfit.engine.optimizer import adopt, build_optimizer, host_moments
from trainfit.engine.step import update_once
from trainfit.kernels import saved_on_host

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "adamw_bf16"},
    "8bit": {"kind": "adamw_8bit"},
    "adafactor": {"kind": "adafactor"},
    "muon": {"kind": "muon"},
    "offloaded": {"kind": "adamw_fused", "offload": True},
    "offloaded bf16": {"kind": "adamw_bf16", "offload": True},
}
PARTS = [pytest.param(options, id=name) for name, options in KINDS.items()]


@pytest.fixture(autouse=True)
def small_weights_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_moments, "LEAST", 64)


def chosen(task: ToyTask, options: dict[str, Any], **changes: Any) -> LoopSettings:
    return settings(task, epochs=1.0, checkpoint_steps=2, optimizer=options, **changes)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU())
        self.head = nn.Linear(80, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.body(values))


def curve(make: Callable[[nn.Module], Any], seed: int, steps: int = 300) -> list[float]:
    """Losses of a small regression."""
    torch.manual_seed(seed)
    model, target = Mlp(), torch.randn(16)
    optimizer, losses = make(model), []
    for _ in range(steps):
        values = torch.randn(32, 16)
        loss = ((model(values)[:, 0] - (values @ target).tanh()) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tails(curves: list[list[float]]) -> Tensor:
    """Means of each fifth of the curves."""
    return torch.tensor(curves).view(len(curves), 5, -1).mean(2)


@pytest.fixture(scope="module")
def theirs() -> Tensor:
    """Curves of torch's AdamW."""

    def reference(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)

    return tails([curve(reference, seed) for seed in range(4)])


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit"])
def test_losses_stay_within_the_seeds_range_of_torchs_adamw(kind: str, theirs: Tensor) -> None:
    made = OptimizerSettings(kind=kind, learning_rate=3e-3)
    ours = tails([curve(lambda model: build_optimizer(model, made), seed) for seed in (1, 2)])
    assert (ours[:, -1] < 0.1 * ours[:, 0]).all()  # it learns
    spread = theirs.max(0).values - theirs.min(0).values
    assert (ours <= theirs.max(0).values + 0.1 * spread).all()
    assert (ours >= theirs.min(0).values - 0.1 * spread).all()
    assert ((ours - theirs[1:3]).abs() < 0.15 * spread).all()


@pytest.mark.parametrize(
    ("kind", "dtypes", "each"),
    [
        ("adamw_bf16", {torch.bfloat16}, 4.0),
        ("adamw_8bit", {torch.uint8, torch.float32}, 2 + 8 / 256),
    ],
)
def test_moments_take_few_bytes(kind: str, dtypes: set[torch.dtype], each: float) -> None:
    model = nn.Linear(512, 64, bias=False)
    made = build_optimizer(model, OptimizerSettings(kind=kind, learning_rate=0.1))
    state = {name: t for name, t in made.state[model.weight].items() if name != "step"}
    assert {tensor.dtype for tensor in state.values()} == dtypes
    assert sum(tensor.nbytes for tensor in state.values()) == each * model.weight.numel()
    assert model.weight.dtype == torch.float32


def test_small_weights_keep_float32_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_moments, "LEAST", 4096)
    model = nn.Linear(64, 63)
    made = build_optimizer(model, OptimizerSettings(kind="adamw_8bit", learning_rate=0.1))
    assert {t.dtype for state in made.state.values() for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("options", PARTS)
def test_a_crash_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    task = ToyTask(norm=True)
    train(task, chosen(task, options), tmp_path / "whole")
    with pytest.raises(Crash):
        train(task, chosen(task, options), tmp_path / "run", observers=[CrashAt(3)])
    train(task, chosen(task, options), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


@pytest.mark.parametrize("options", PARTS)
def test_memory_that_runs_out_in_an_update_changes_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Wherever it runs out, each weight is updated once."""

    def faulty(run: Path, at: set[int]) -> Faults:
        task, faults = ToyTask(), Faults(at)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, task, faults)
            train(task, chosen(task, options), run)
        return faults

    updates = sorted(faulty(tmp_path / "clean", set()).phases["update"])
    expected = final_bits(tmp_path / "clean")
    for number, at in enumerate(updates[5 :: max(1, len(updates) // 4)]):
        assert faulty(tmp_path / str(number), {at}).raised == 1
        assert final_bits(tmp_path / str(number)) == expected


@pytest.mark.parametrize("options", PARTS)
def test_gradients_that_are_not_finite_skip_the_update(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16))
    made = build_optimizer(model, OptimizerSettings(learning_rate=0.1, **options))

    def bits() -> list[Tensor]:
        parts = getattr(made, "optimizers", (made,))
        held = [v for one in parts for state in one.state.values() for v in state.values()]
        return [t.clone() for t in (*model.parameters(), *held)]

    for finite in (True, False, True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 if finite else torch.nan)
        before = bits()
        update_once(made, torch.tensor(finite))
        unchanged = all(map(torch.equal, before, bits()))
        assert unchanged is not finite


@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_bf16"])
def test_moments_on_the_host_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    task = ToyTask(norm=True)
    train(task, chosen(task, {"kind": kind}), tmp_path / "here")
    train(task, chosen(task, {"kind": kind, "offload": True}), tmp_path / "there")
    assert final_bits(tmp_path / "there") == final_bits(tmp_path / "here")


def test_few_moments_on_the_host_are_cut_into_buckets() -> None:
    model = nn.Sequential(nn.Linear(100, 30), nn.Linear(30, 7))
    made = build_optimizer(
        model, OptimizerSettings(learning_rate=0.1, weight_decay=0.1, offload=True)
    )
    host = host_moments(made)
    assert host is not None
    parts = [part for group in host.buckets for bucket in group for part in bucket.parts]
    assert sum(part.length for part in parts) == sum(p.numel() for p in model.parameters())
    assert sum(len(group) for group in host.buckets) > 6
    held = sum(flat.nbytes for flat in host.flat.values())
    assert sum(t.nbytes for slot in host.slots for t in slot.values()) <= 0.3 * held


@pytest.mark.parametrize("options", [KINDS["bf16"], KINDS["8bit"], KINDS["offloaded"]])
def test_folds_share_an_optimizer(tmp_path: Path, options: dict[str, Any]) -> None:
    shared, parts = Shared(), set()
    for fold, sequences in enumerate((38, 30)):
        task = ToyTask(sequences=sequences)
        train(task, chosen(task, options), tmp_path / f"s{fold}", shared=shared)
        train(task, chosen(task, options), tmp_path / f"a{fold}")
        assert final_bits(tmp_path / f"s{fold}") == final_bits(tmp_path / f"a{fold}")
        parts.add(id(shared.parts and shared.parts.optimizer))
    assert len(parts) == 1


def test_a_checkpoint_of_other_moments_is_refused(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, chosen(task, {"kind": "adamw_fused"}), tmp_path / "run")
    for kind in ("adamw_bf16", "adamw_8bit"):
        with pytest.raises(BadInput, match="state of the optimizer does not fit"):
            train(task, chosen(task, {"kind": kind}), tmp_path / "run", resume=True)


def test_codes_are_in_the_checkpoint_with_their_scales(tmp_path: Path) -> None:
    task = ToyTask()
    train(task, chosen(task, KINDS["8bit"]), tmp_path / "run")
    folder, _ = latest_good(tmp_path / "run")
    assert folder is not None
    saved = read_tensors(folder / "optimizer.safetensors")
    assert saved["embedding.weight/exp_avg"].dtype == torch.uint8
    assert saved["embedding.weight/exp_avg_scale"].shape == (-(-50 * 8 // 256),)


def test_what_does_not_go_together_is_refused() -> None:
    for kind in ("adamw_8bit", "adafactor", "muon", "adamw"):
        with pytest.raises(BadInput, match="cannot be kept in the host's memory"):
            OptimizerSettings(kind=kind, learning_rate=0.1, offload=True)
    with pytest.raises(BadInput, match="has no option 'amsgrad'"):
        OptimizerSettings(kind="adamw_bf16", learning_rate=0.1, options={"amsgrad": True})
    model = nn.Linear(20, 20)
    small = build_optimizer(model, OptimizerSettings(kind="adamw_8bit", learning_rate=0.1))
    with pytest.raises(BadInput, match="does not shard 8-bit"):
        setup._check_sharded(small)
    with pytest.raises(BadInput, match="float32 weights"):
        adopt(model.double(), SmallAdamW([{"params": list(model.parameters())}], "bf16", lr=0.1))


def test_adafactor_steps_by_the_learning_rate() -> None:
    """By torch's default a step would be the rate times the size of the weights."""
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    made = build_optimizer(model, OptimizerSettings(kind="adafactor", learning_rate=1e-3))
    model.weight.grad = torch.randn(64, 64)
    update_once(made, torch.tensor(True))
    moved = (model.weight.detach() - before).square().mean().sqrt()
    assert 0.5e-3 < moved < 1.5e-3


def test_moments_that_the_host_cannot_hold_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    groups: Any = [{"params": [torch.zeros(64).as_subclass(OnGpu)]}]
    monkeypatch.setattr(adamw_moments, "pin", lambda *_: None)
    monkeypatch.setattr(saved_on_host, "memory_left", lambda: 512)
    made = HostMoments(groups, torch.float32)
    assert sum(flat.nbytes for flat in made.flat.values()) == 512
    monkeypatch.setattr(saved_on_host, "memory_left", lambda: 511)
    monkeypatch.setattr(adamw_moments, "host_zeros", lambda *_: pytest.fail("it is too large"))
    with pytest.raises(OutOfMemory, match="memory is too small"):
        HostMoments(groups, torch.float32)
