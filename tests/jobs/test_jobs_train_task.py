"""A classifier's micro-batches through the task, as the engine asks for them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_tiny import TINY, tiny
from torch import Tensor
from torch._dynamo.utils import counters

from trainfit.data.tokens import Tokens
from trainfit.engine import setup
from trainfit.engine.loop import train
from trainfit.engine.loop_settings import LoopSettings, OptimizerSettings
from trainfit.jobs.classification import ClassifierTask, _packed, _padded, in_batches
from trainfit.jobs.models import classifier
from trainfit.jobs.probes import synthetic_tokens
from trainfit.packing.cut_ladder import fit_padded_parts
from trainfit.packing.steps import sample_parts
from trainfit.runtime import compile_blocks

LENGTHS = (7, 3, 12, 5)


def tokens(sizes: tuple[int, ...] = LENGTHS) -> Tokens:
    lengths = np.array(sizes)
    return Tokens(
        ids=np.random.default_rng(0).integers(5, 60, lengths.sum()).astype(np.int32),
        starts=np.cumsum([0, *sizes[:-1]]),
        lengths=lengths,
        labels=np.arange(len(sizes)) % 2,
    )


@pytest.fixture
def task() -> ClassifierTask:
    model = tiny("bert-base").double().eval()
    return ClassifierTask(lambda: model, tokens(), tokens(), effective_batch=4)


def test_a_packed_micro_batch_has_the_loss_and_gradient_of_the_padded_one(task: ClassifierTask):
    model = task.build_model()
    found = []
    for rows, width, slots in ((1, 32, 6), (4, 12, None)):
        model.zero_grad()
        loss = task.loss(model, task.collate((0, 1, 2, 3), rows, width, slots))
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((float(loss), torch.cat(gradients)))
    (packed, one), (padded, other) = found
    assert packed == pytest.approx(padded, rel=1e-10)
    assert float((one - other).norm()) < 1e-9 * float(other.norm())


def test_a_packed_row_says_how_long_its_sequences_are(
    task: ClassifierTask, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    plain = classifier.lay_out

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(plain(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(classifier, "lay_out", noting)
    task.loss(task.build_model(), task.collate((1, 3), 1, 32, 6))
    assert [layout.max_seqlen for layout in seen] == [max(LENGTHS)]


@pytest.mark.parametrize("name", ["bert-base", "deberta-v3-base", "modernbert-base"])
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), batch=st.integers(1, 5))
@settings(max_examples=15)
def test_an_evaluation_of_packed_rows_finds_what_one_of_padded_rows_does(
    name: str, lengths: list[int], batch: int
):
    model = tiny(name).double().eval()
    chosen = tokens(tuple(lengths))
    shapes: list[Any] = []

    def compute(**inputs: Any) -> Tensor:
        shapes.append((inputs["input_ids"].numel(), inputs["cu_seqlens"].numel()))
        found: Tensor = model(**inputs)
        return found

    alone = torch.cat([in_batches(model, model, chosen.subset([n]), 1) for n in range(len(chosen))])
    padded = in_batches(model, model, chosen, batch, packed=False)
    packed = in_batches(model, compute, chosen, batch, packed=True)
    torch.testing.assert_close(padded, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    assert len(set(shapes)) == 1  # one graph serves all
    assert shapes[0][0] <= batch * max(lengths)  # no more tokens than the padded rows hold


@pytest.mark.parametrize(
    ("batches", "device", "shapes", "most"),
    [(_packed, "cuda", 1, 1.02), (_padded, "cuda", 8, 1.15), (_padded, "cpu", 57, 1.05)],
)
def test_an_evaluation_computes_little_in_few_shapes(
    batches: Any, device: str, shapes: int, most: float
):
    sizes = np.random.default_rng(0).lognormal(5, 0.7, 900).clip(2, 512).astype(int)
    made = synthetic_tokens(sizes.tolist(), 90)
    found = [(chosen, make()) for chosen, make in batches(made, 16, 0, torch.device(device))]
    assert sorted(n for chosen, _ in found for n in chosen) == list(range(900))
    seen = [batch["input_ids"].shape for _, batch in found]
    assert len(set(seen)) <= shapes
    assert len({batch["labels"].shape for _, batch in found}) == 1
    assert sum(shape.numel() for shape in seen) < most * sizes.sum()
    assert max(shape.numel() for shape in seen) <= 16 * max(sizes)


@pytest.mark.parametrize("name", ["bert-base", "deberta-v3-base", "modernbert-base"])
def test_rows_without_a_sequence_change_no_gradient(name: str):
    found = []
    for rows in (4, 7):
        torch.manual_seed(0)
        task = ClassifierTask(lambda: tiny(name).double(), tokens(), tokens(), effective_batch=4)
        model = task.build_model().eval()
        loss = task.loss(model, task.collate((0, 1, 2, 3), rows, 32, None))
        loss.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([loss.detach()[None], *parts]))
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("attention", "packs"), [("auto", True), ("masked", False)])
def test_a_model_that_is_not_to_pack_is_evaluated_on_padded_rows(
    attention: str, packs: bool, monkeypatch: pytest.MonkeyPatch
):
    """As if a kernel were here: what the plan turned off stays off in an evaluation."""
    monkeypatch.setattr(classifier, "packed_path", lambda *_, **__: ("varlen", ""))
    model = tiny("bert-base", attention=attention).eval()
    seen: list[set[str]] = []

    def compute(**inputs: Any) -> Tensor:
        seen.append(set(inputs))
        return torch.zeros(len(LENGTHS), 2)

    in_batches(model, compute, tokens(), 4)
    assert ["cu_seqlens" in names for names in seen] == [packs]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert-base", "deberta-v3-base"])
def test_an_evaluation_on_a_gpu_takes_packed_rows_and_agrees(name: str):
    heads_of_16 = TINY[name] | {"num_attention_heads": 2}
    model = tiny(name, overrides=heads_of_16).cuda().eval()
    chosen = tokens((17, 3, 30, 8, 8, 1))
    with torch.autocast("cuda", torch.bfloat16):
        assert model.packs_here(30)
        packed = in_batches(model, model, chosen, 2)
        padded = in_batches(model, model, chosen, 2, packed=False)
    torch.testing.assert_close(packed, padded, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "name", [pytest.param("bert-base", marks=pytest.mark.soak), "gemma-3-1b-it"]
)
def test_padded_rows_of_many_shapes_are_compiled_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice where layers with a window and without take turns; and again for a single row."""
    monkeypatch.setattr(setup, "compile_blocks", partial(compile_blocks, backend="eager"))
    sizes = np.random.default_rng(0).integers(2, 31, 160)
    sizes[::7] = 30
    made = synthetic_tokens(sizes.tolist(), 90)
    task = ClassifierTask(lambda: tiny(name), made, made.subset(range(4)), effective_batch=20)
    shapes = set()
    collate = task.collate

    def seen(sequences: Any, rows: int, width: int, slots: int | None) -> Any:
        shapes.add((rows, width))
        return collate(sequences, rows, width, slots)

    monkeypatch.setattr(task, "collate", seen)
    chosen = LoopSettings(
        cuts=(
            fit_padded_parts(
                sample_parts(made.lengths, 20, 1), int(made.lengths.max()), 150, multiple=2
            ),
        ),
        optimizer=OptimizerSettings(learning_rate=1e-4),
        compile=True,
        profile_step=False,
        keep_checkpoints=0,
    )
    torch.compiler.reset()
    counters.clear()
    train(task, chosen, tmp_path / "run")
    assert len(shapes) > 2
    single = any(rows == 1 for rows, _ in shapes)
    kinds = 2 if name == "gemma-3-1b-it" else 1
    assert counters["stats"]["unique_graphs"] <= kinds * (1 + single)
    torch.compiler.reset()
