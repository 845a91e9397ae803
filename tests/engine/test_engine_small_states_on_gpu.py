"""Optimizers that take less memory, on a GPU: captured, offloaded, and predicted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import Crash, CrashAt, final_bits
from test_engine_captured_on_gpu import Task
from torch import nn

from trainfit.core.plan_records import RuntimeSettings
from trainfit.engine import adamw_moments
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings
from trainfit.engine.optimizer import build_optimizer, host_moments
from trainfit.engine.step import update_once
from trainfit.measuring.receipt import EVIDENCE
from trainfit.measuring.trace import Evidence
from trainfit.packing import ladder
from trainfit.runtime import applied

pytestmark = pytest.mark.gpu
OFFLOADED = ("adamw_fused", "adamw_bf16")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adamw_moments, "LEAST", 512)
    with applied(RuntimeSettings(deterministic=True)):
        yield


def settings(**changes: Any) -> LoopSettings:
    optimizer = changes.pop("optimizer")
    cuts = ladder(Task().lengths(), 32, 32 * 32, padded=True)
    chosen: dict[str, Any] = {
        "epochs": 4.0,
        "device": "cuda",
        "precision": "bf16",
        "cuts": cuts,
        "optimizer": OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, **optimizer),
        "checkpoint_steps": 4,
    }
    return LoopSettings(**(chosen | changes))


def ran(run: Path, **changes: Any) -> str:
    train(Task(), settings(**changes), run)
    return final_bits(run)


@pytest.mark.parametrize("kind", ["adamw_bf16", "adamw_8bit"])
def test_captured_updates_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    optimizer = {"kind": kind}
    eager = ran(tmp_path / "eager", optimizer=optimizer)
    assert ran(tmp_path / "captured", optimizer=optimizer, cuda_graph=True) == eager
    seen = Evidence.load(tmp_path / "captured" / EVIDENCE)
    assert seen.compiler.graph_launches > 0
    assert seen.optimizers == {"SmallAdamW": "own"}
    dtype = {"adamw_bf16": "bfloat16", "adamw_8bit": "uint8"}[kind]
    assert seen.moments[f"{dtype} on cuda"] > 0


@pytest.mark.parametrize("kind", OFFLOADED)
def test_moments_on_the_host_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    here = ran(tmp_path / "here", optimizer={"kind": kind})
    there = {"kind": kind, "offload": True}
    assert ran(tmp_path / "there", optimizer=there, cuda_graph=True) == here
    seen = Evidence.load(tmp_path / "there" / EVIDENCE)
    assert seen.fetched > 0
    assert seen.compiler.graph_launches == 0
    assert all(place.endswith("on the host") for place in seen.moments)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "adamw_bf16"},
        {"kind": "adamw_8bit"},
        {"kind": "adamw_fused", "offload": True},
        {"kind": "adamw_bf16", "offload": True},
        {"kind": "adafactor"},
        {"kind": "muon"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_crash_changes_nothing(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    whole = ran(tmp_path / "whole", optimizer=optimizer)
    chosen = settings(optimizer=optimizer)
    with pytest.raises(Crash):
        train(Task(), chosen, tmp_path / "run", observers=[CrashAt(6)])
    train(Task(), settings(optimizer=optimizer), tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == whole


@pytest.mark.parametrize("kind", OFFLOADED)
def test_large_moments_come_and_go_bucket_by_bucket(kind: str) -> None:
    """More buckets than slots, in pinned memory, with the bits of moments that stay."""

    def trained(offload: bool) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8192, 8000, bias=False, device="cuda")
        made = build_optimizer(
            model, OptimizerSettings(kind=kind, learning_rate=1e-2, offload=offload)
        )
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(4):
            model.weight.grad = torch.randn(8000, 8192, device="cuda", generator=generator)
            update_once(made, torch.ones((), dtype=torch.bool, device="cuda"))
        return model.weight.detach(), made

    here, plain = trained(offload=False)
    there, made = trained(offload=True)
    assert torch.equal(here, there)
    host = host_moments(made)
    assert host is not None
    assert len(host.buckets[0]) > 6
    assert all(flat.is_pinned() for flat in host.flat.values())
    host.settle()
    (weight,) = plain.state
    (other,) = made.state
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(plain.state[weight][name].cpu(), made.state[other][name])


def peak(arguments: dict[str, Any]) -> int:
    """Most bytes that the third step of a real model has allocated, workspaces included."""
    from trainfit.jobs.probes import encoder_step

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model, make_step = encoder_step(**arguments, device="cuda")
        step = make_step(model)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_bf16", "adamw_8bit", "adafactor", "muon"])
def test_memory_is_predicted_within_three_percent(
    kind: str, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainfit.planning.estimator.estimate import GIB, estimate

    if offloaded and kind not in OFFLOADED:
        pytest.skip("its moments stay on the GPU")
    monkeypatch.setattr(adamw_moments, "LEAST", 4096)
    arguments: dict[str, Any] = {
        "name": "bert-base",
        "rows": 8,
        "width": 128,
        "slots": None,
        "lengths": None,
        "micro_batches": 1,
        "precision": "bf16",
        "optimizer": kind,
        "offload_optimizer": offloaded,
        "overrides": {"num_hidden_layers": 6},
    }
    told = estimate("trainfit.jobs.probes:encoder_step", "h200", **arguments)
    measured = peak(arguments) / GIB
    assert told.peak_allocated_gib == pytest.approx(measured, rel=0.03)
