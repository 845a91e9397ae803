"""What only a GPU can show: nothing waits for it, and memory that really runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_toy import Crash, CrashAt, ToyTask, final_bits, final_weights, settings
from torch import Tensor, nn

from trainfit.core.plan_records import RuntimeSettings
from trainfit.data.batches import StepLoader, to_device
from trainfit.engine.captured import Readings
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoaderSettings, LoopSettings, OptimizerSettings
from trainfit.engine.optimizer import build_optimizer
from trainfit.engine.step import loss_scale, plain_step
from trainfit.packing import ladder
from trainfit.runtime import applied

pytestmark = pytest.mark.gpu
CAP_GIB = 12
WORKERS = LoaderSettings(num_workers=2, pin_memory=True, persistent_workers=True, prefetch_factor=2)


class WideTask:
    """Activations that need far more memory than the weights: about 0.3 MB for each token."""

    width = 1024

    def build_model(self) -> nn.Module:
        layers = [
            layer
            for _ in range(48)
            for layer in (nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(0.1))
        ]
        return nn.Sequential(nn.Embedding(100, self.width), *layers, nn.Linear(self.width, 2))

    def lengths(self) -> Sequence[int]:
        return [512] * 1024

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        return [list(range(start, start + 256)) for start in range(0, 1024, 256)]

    def weight(self, sequences: Sequence[int]) -> float:
        return 512.0 * len(sequences)

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Tensor]:
        ids = torch.arange(width).repeat(len(sequences), 1).add(torch.tensor(sequences)[:, None])
        filler = torch.zeros(rows - len(sequences), width, dtype=torch.int64)
        ids = ids % 100
        return {
            "ids": torch.cat([ids, filler]),
            "targets": torch.cat([ids % 2, filler - 100]),
        }

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["ids"]).float()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        total = torch.zeros((), device="cuda")
        for start in range(0, 256, batch_size):
            batch = self.collate(range(start, min(start + batch_size, 256)), batch_size, 512, None)
            total += self.loss(model, {name: value.cuda() for name, value in batch.items()})
        return {"loss": float(total) / 512 / 256}


@pytest.fixture
def capped() -> Iterator[None]:
    """A GPU of 12 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    if total < (CAP_GIB + 4) << 30:
        pytest.skip(f"needs more than {CAP_GIB + 4} GiB")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((CAP_GIB << 30) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("capped")
def test_a_run_far_too_large_for_its_gpu_finishes_by_itself(tmp_path: Path) -> None:
    task = WideTask()
    chosen = LoopSettings(
        epochs=1.0,
        device="cuda",
        precision="bf16",
        cuts=ladder(task.lengths(), 256, 256 * 512, padded=True),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        eval_batch_size=256,
        loader=WORKERS,
        logging_steps=1,
    )
    with applied(RuntimeSettings(deterministic=True)):
        result = train(task, chosen, tmp_path / "run")
        assert (result.status, result.steps) == ("finished", 4)
        kinds = [event.kind for event in result.events]
        assert kinds
        assert set(kinds) == {"oom"}
        (_, rung) = result.cuts[-1]
        assert rung >= 2
        assert result.peak_memory_gib is not None
        assert result.peak_memory_gib < CAP_GIB
        replay = replace(chosen, cut_changes=result.cuts, eval_batch_size=1)
        again = train(task, replay, tmp_path / "again")
        assert again.events == ()
        assert final_bits(tmp_path / "run") == final_bits(tmp_path / "again")


RESUMED = [("fp32", "adamw_fused"), ("bf16", "adamw_fused"), ("fp16", "adamw_fused")]
OTHERS = [("bf16", "muon"), ("fp16", "sgd"), ("fp32", "adafactor"), ("bf16", "nadam")]


@pytest.mark.parametrize(("precision", "kind"), [*RESUMED, *OTHERS, ("bf16", "adam_fused")])
def test_a_resumed_run_drops_out_the_same(tmp_path: Path, precision: str, kind: str) -> None:
    task = ToyTask(norm=True)
    optimizer = {"kind": kind}
    chosen = settings(
        task,
        device="cuda",
        precision=precision,
        checkpoint_steps=3,
        loader=WORKERS,
        optimizer=optimizer,
    )
    task.evaluate = lambda model, size: {"loss": 1.0}  # type: ignore[method-assign]
    with applied(RuntimeSettings(deterministic=True)):
        train(task, chosen, tmp_path / "whole")
        with pytest.raises(Crash):
            train(task, chosen, tmp_path / "run", observers=[CrashAt(7)])
        train(task, chosen, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nothing_in_a_step_waits_for_the_device(precision: str) -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=0.1))
    scale = loss_scale(precision, device)  # type: ignore[arg-type]
    batches = [{"x": torch.randn(8, 64).pin_memory()} for _ in range(3)]
    readings = Readings()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            numbers = plain_step(
                model, optimizer, lambda m, b: m(b["x"]).float().sum(), to_device(batches, device),
                24.0, device_type="cuda", precision=precision, max_grad_norm=1.0, scale=scale,  # type: ignore[arg-type]
            )  # fmt: skip
            readings.add(step, numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived = readings.arrived(wait=True)
    assert [reading.step for reading in arrived] == [0, 1, 2]
    assert arrived[-1].loss == pytest.approx(numbers.loss.item())


def test_batches_are_pinned_where_the_plan_says_so() -> None:
    task = ToyTask()
    for pinned in (True, False):
        options = replace(WORKERS, pin_memory=pinned)
        loader = StepLoader(task, options, torch.device("cuda"))
        for step in loader.steps(task.steps(0), settings(task).cuts[0]):
            assert all(batch["ids"].is_pinned() is pinned for batch in step.batches)


class SmallTask(WideTask):
    """Blocks that torch.compile takes, in steps of four micro-batches."""

    width = 64

    def build_model(self) -> nn.Module:
        block = [nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(3)]

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(100, SmallTask.width)
                self.blocks = nn.ModuleList(block)
                self.head = nn.Linear(SmallTask.width, 2)

            def forward(self, ids: Tensor) -> Tensor:
                values = self.embedding(ids)
                for one in self.blocks:
                    values = one(values)
                return self.head(values)

        return Model()


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_gradients_add_up_in_cuda_graphs(tmp_path: Path, scope: str) -> None:
    task = SmallTask()
    chosen = LoopSettings(
        epochs=2.0,
        device="cuda",
        cuts=ladder(task.lengths(), 256, 64 * 512, padded=True),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        eval_batch_size=256,
        profile_step=False,
    )
    assert chosen.cuts[0].micro_batches == 4
    train(task, chosen, tmp_path / "plain")
    graphs = replace(chosen, compile=True, compile_mode="reduce-overhead", compile_scope=scope)
    train(task, graphs, tmp_path / "graphs")
    expected, found = final_weights(tmp_path / "plain"), final_weights(tmp_path / "graphs")
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
