"""Folds that share a model: each ends with the bits it would have in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import ToyTask, final_bits, settings
from torch import nn

from trainfit.engine.loop import Shared, train
from trainfit.engine.loop_settings import LoopSettings


def trained(task: ToyTask, chosen: LoopSettings, run: Path, shared: Shared | None) -> str:
    train(task, chosen, run, shared=shared)
    return final_bits(run)


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": True}, {"frozen": True}, {"dtype": torch.bfloat16}],
    ids=["plain", "buffers", "frozen", "half"],
)
def test_a_fold_has_the_bits_of_a_run_of_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    shared = Shared()
    models = set()
    for fold, sequences in enumerate((38, 30, 44)):
        task = ToyTask(sequences=sequences, **options)
        chosen = replace(settings(task), seed=fold, epochs=2.0)
        alone = trained(
            ToyTask(sequences=sequences, **options), chosen, tmp_path / f"a{fold}", None
        )
        assert trained(task, chosen, tmp_path / f"s{fold}", shared) == alone
        assert shared.parts is not None
        models.add(id(shared.parts.model))
    assert len(models) == 1


def test_another_optimizer_or_model_is_not_taken_over(tmp_path: Path) -> None:
    task, shared = ToyTask(), Shared()
    chosen = replace(settings(task), epochs=1.0)
    train(task, chosen, tmp_path / "1", shared=shared)
    first = shared.parts
    assert first is not None
    other = replace(chosen, optimizer=replace(chosen.optimizer, betas=(0.8, 0.9)))
    assert trained(ToyTask(), other, tmp_path / "2", shared) == trained(
        ToyTask(), other, tmp_path / "3", None
    )
    assert shared.parts is not None
    assert shared.parts.model is not first.model

    class Wider(ToyTask):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.register_buffer("more", torch.zeros(2))
            return model

    train(Wider(), other, tmp_path / "4", shared=shared)
    assert "more" in dict(shared.parts.model.named_buffers())


def test_frozen_weights_change_only_once_nothing_reads_them(tmp_path: Path) -> None:
    shared, seen = Shared(), []
    task = ToyTask(frozen=True)
    train(task, replace(settings(task), seed=0, epochs=1.0), tmp_path / "1", shared=shared)
    assert shared.parts is not None
    table: Any = shared.parts.model.get_parameter("embedding.weight")
    before = table.clone()
    shared.settle = lambda: seen.append(table.clone())
    train(task, replace(settings(task), seed=0, epochs=1.0), tmp_path / "2", shared=shared)
    assert not seen  # the same ones are not written
    train(task, replace(settings(task), seed=1, epochs=1.0), tmp_path / "3", shared=shared)
    assert [torch.equal(each, before) for each in seen] == [True]
    assert not torch.equal(table, before)
