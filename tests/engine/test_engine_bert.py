"""A real encoder, packed and padded: dropout and all, it goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from engine_faults import Faults, plant
from engine_toy import cuts, final_bits, settings
from torch import Tensor, nn

from trainfit.engine.loop import train
from trainfit.engine.observers import Observer
from trainfit.jobs.models.classifier import build_classifier, classification_loss
from trainfit.jobs.models.classifier_settings import ClassifierSettings

IGNORED = -100
SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
}


class BertTask:
    """Which of two kinds of token a sequence has more of."""

    effective_batch = 8

    def __init__(self, method: str = "full") -> None:
        self.method = method
        generator = torch.Generator().manual_seed(3)
        sizes = torch.randint(3, 13, (20,), generator=generator).tolist()
        self.tokens = [torch.randint(5, 60, (n,), generator=generator) for n in sizes]

    def build_model(self) -> nn.Module:
        return build_classifier(
            ClassifierSettings(name="bert-base", classes=2, overrides=SMALL, method=self.method)
        )

    def lengths(self) -> Sequence[int]:
        return [len(tokens) for tokens in self.tokens]

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        return [range(start, min(start + 8, 20)) for start in range(0, 20, 8)]

    def weight(self, sequences: Sequence[int]) -> float:
        return float(len(sequences))

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, Tensor]:
        chosen = [self.tokens[sequence] for sequence in sequences]
        labels = torch.tensor([int((t > 32).float().mean() > 0.5) for t in chosen])
        if slots is None:
            ids, mask = torch.zeros(2, rows, width, dtype=torch.long).unbind()
            for row, tokens in enumerate(chosen):
                ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        row = torch.cat([*chosen, torch.zeros(width - sum(map(len, chosen)), dtype=torch.long)])
        ends = torch.tensor([0, *map(len, chosen)]).cumsum(0).int()
        return {"input_ids": row[None], "cu_seqlens": ends, "labels": labels}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return classification_loss(model(**inputs), batch["labels"])

    def evaluate(self, model: nn.Module, batch_size: int) -> dict[str, float]:
        batch = self.collate(range(20), 20, 12, None)
        return {"loss": float(self.loss(model, batch)) / 20}


class Crash(Exception):
    pass


class CrashAt(Observer):
    def on_step(self, step: int) -> None:
        if step == 5:
            raise Crash


@pytest.mark.parametrize(
    ("padded", "method"), [(True, "full"), (False, "full"), (True, "frozen"), (True, "lora")]
)
def test_an_encoder_that_was_interrupted_ends_with_the_same_bits(
    tmp_path: Path, padded: bool, method: str
) -> None:
    task = BertTask(method)
    chosen = settings(task, padded=padded, checkpoint_steps=2)  # type: ignore[arg-type]
    train(task, chosen, tmp_path / "whole")
    with pytest.raises(Crash):
        train(task, chosen, tmp_path / "run", observers=[CrashAt()])
    train(task, chosen, tmp_path / "run", resume=True)
    assert final_bits(tmp_path / "run") == final_bits(tmp_path / "whole")


def test_an_encoder_that_ran_out_of_memory_replays(tmp_path: Path) -> None:
    task = BertTask()
    chosen = settings(task, eval_batch_size=64)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        faults = plant(patch, task, Faults({150, 400, 700}))
        failed = train(task, chosen, tmp_path / "failed")
    assert faults.raised == 3
    assert len(failed.events) >= 2
    replay = settings(BertTask(), cut_changes=failed.cuts)  # type: ignore[arg-type]
    train(BertTask(), replay, tmp_path / "again")
    assert final_bits(tmp_path / "failed") == final_bits(tmp_path / "again")
    assert len(cuts(task)) == 4  # type: ignore[arg-type]
