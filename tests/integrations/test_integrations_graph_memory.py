"""Memory of CUDA graphs: what the script's own passes need stays theirs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_stand_in import run_again
from unpadded_tiny import HEADS, batch, config

import trainfit
from trainfit.integrations import body_graphs, script_hooks
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.captured_passes import crowded, no_room
from trainfit.integrations.host_batches import Switch
from trainfit.integrations.speeding import facts_in
from trainfit.integrations.turns import GRAPHS, PADDED, UNPADDED, Turns
from trainfit.integrations.unpadded_calls import Unpadding

GIB = 2**30


def graphed(head: str = "classes") -> tuple[Any, Unpadding, BodyGraphs]:
    torch.manual_seed(0)
    model = trainfit.unpadded(HEADS[head].from_config(config("bert"))).train()
    [facts] = facts_in(model)
    facts.graphs = BodyGraphs(run_again)
    return model, facts, facts.graphs


def step(model: Any, **options: Any) -> None:
    found = model(**batch("bert", **options))
    real = batch("bert", **options)["attention_mask"].bool()
    (found.logits if found.logits.dim() == 2 else found.logits[real]).sum().backward()


@pytest.mark.parametrize(
    ("peak", "most", "fits"),
    [
        (30, 1000, True),  # nothing is padded: two times 20 GiB beside the 10 that stay
        (60, 1000, False),
        (60, 4000, True),  # three quarters are padding, which the graph does not have
        (92, 4000, False),  # the script's own passes need nearly all memory
    ],
)
def test_room_is_left_for_the_largest_pass_of_the_script(
    peak: int, most: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40 * GIB, 100 * GIB))
    for name, size in (
        ("max_memory_allocated", peak),
        ("memory_allocated", 10),
        ("memory_reserved", 60),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size * GIB)
    why = no_room(torch.device("cuda", 0), [], 1000 / most)
    assert (why is None) is fits


@pytest.mark.parametrize(("growth", "fits"), [(1.1, True), (2.0, False)])
def test_a_pass_that_grows_may_need_the_memory_of_graphs(
    growth: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 100 * GIB))
    for name, size in (("max_memory_allocated", 50), ("memory_allocated", 10)):
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 80 * GIB)
    # 70 GiB stay beside the 20 of graphs; the pass takes 44 or 80.
    assert crowded(torch.device("cuda", 0), 20 * GIB, growth) is not fits


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_graphs_give_way_to_a_larger_batch(
    padded: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, facts, graphs = graphed()
    asked = []

    def judge(_device: Any, taken: int, growth: float) -> bool:
        asked.append((taken, growth))
        return not fits

    monkeypatch.setattr(body_graphs, "crowded", judge)
    for _ in range(3):
        step(model, lengths=(10, 10, 5, 5))
    graphs._taken = 7  # a stand-in takes nothing
    facts.off = padded
    for _ in range(2):
        step(model, lengths=(20, 15, 5, 5))
    assert asked == [(7, 80 / 30 if padded else 45 / 30)]
    assert bool(graphs._lanes) is fits
    assert ("larger than all before" in (graphs.obstacle or "")) is not fits


@pytest.mark.parametrize("head", ["classes", "tokens"])
def test_the_largest_pass_is_counted_with_the_padding_that_it_had(head: str) -> None:
    model, facts, _ = graphed(head)
    rows = batch("bert")["input_ids"]
    real = int(batch("bert")["attention_mask"].sum())
    facts.wait = 1
    with torch.no_grad():  # takes little memory
        model(**batch("bert", lengths=(40, 40, 40, 40)))
    assert facts.most == 0
    step(model)
    assert facts.most == (real if head == "classes" else rows.numel())  # watched with padding
    facts.off = True
    step(model)
    assert facts.most == rows.numel()


def test_nothing_is_captured_before_the_script_s_own_steps() -> None:
    model, facts, graphs = graphed()
    turns, ways, captured = Turns(clock=lambda: 0.0, switch=Switch()), [], []
    turns.begin([facts])
    for _ in range(6):
        ways.append(turns._current)
        step(model)
        turns.stepped()
        captured.append(graphs.captured)
    turns.pause()
    assert ways == [PADDED, PADDED, GRAPHS, GRAPHS, GRAPHS, GRAPHS]
    assert captured == [0, 0, 0, 1, 1, 1]
    assert (facts.tally.own_way, facts.tally.packed) == (2, 4)


@pytest.mark.parametrize(("slow", "stays"), [(GRAPHS, UNPADDED), (UNPADDED, GRAPHS)])
def test_graphs_that_are_left_give_their_memory_back(slow: int, stays: int) -> None:
    model, _, graphs = graphed()
    now = 0.0
    turns = Turns(clock=lambda: now, switch=Switch())
    turns.facts.update(facts_in(model))
    for _ in range(70):
        step(model)
        now += {PADDED: 9.0, slow: 5.0}.get(turns._current, 1.0)
        turns.stepped()
    assert turns._current == stays
    assert bool(graphs._lanes) is (stays == GRAPHS)


@pytest.mark.parametrize(
    ("method", "free", "kept"), [("train", 40, False), ("train", 60, True), ("prepare", 40, True)]
)
def test_a_training_that_ends_gives_the_memory_of_its_graphs_back(
    method: str, free: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 100 * GIB))
    monkeypatch.setattr(script_hooks, "_reports", [])
    monkeypatch.setattr(script_hooks, "_begin_turns", lambda *_: None)
    monkeypatch.setattr(script_hooks.atexit, "register", lambda *_: None)
    monkeypatch.setenv("TRAINFIT_SPEED_UP_NAMES", "unpadded")
    model, _, graphs = graphed()

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def train(self, *_: Any) -> None:
            for _ in range(3):
                step(model)

        prepare = train

    name = {"train": "transformers.trainer", "prepare": "accelerate.accelerator"}[method]
    module = SimpleNamespace(__name__=name, Trainer=Trainer, Accelerator=Trainer)
    script_hooks.hook(module, tmp_path)
    for replayed in (2, 4):
        getattr(Trainer(), method)(model)
        assert graphs.replayed >= replayed
        assert bool(graphs._lanes) is kept


def test_a_copy_that_is_made_in_a_step_of_the_script_s_own_is_on() -> None:
    model, facts, graphs = graphed()
    facts.off = graphs.off = True
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        [its] = facts_in(other)
        assert its.graphs is not None
        assert not its.off
        assert not its.graphs.off
        assert its.reads == facts.reads
    assert facts.off


def weak_run_again(work: Callable[[], None]) -> Callable[[], None]:
    """As a captured graph, which holds nothing of the model."""
    run_again(work)
    held: Any = weakref.WeakMethod(work)
    return lambda: held()()


def test_a_model_that_is_dropped_is_freed_with_its_graphs_at_once() -> None:
    """Garbage is collected late, and the script may need the memory for the next model."""
    model, _, graphs = graphed()
    graphs.record = weak_run_again
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step(model)
        assert graphs.replayed == 2
        loss = model(**batch("bert")).logits.sum()
        weight = weakref.ref(model.bert.embeddings.word_embeddings.weight)
        kept = weakref.ref(graphs._lanes[0].graphs[0])
        del model, graphs, _
        loss.backward(retain_graph=True)
        loss.backward()  # eagerly, by the body that the first pass held
        assert weight() is not None
        del loss
        assert weight() is None
        assert kept() is None
    finally:
        gc.enable()
