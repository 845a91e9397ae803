"""Compiled blocks inside of captured passes give the numbers of eager ones, and leave no trace.

Without a GPU a stand-in takes the place of CUDA's graphs, and torch's own stand-in that of Inductor
where nothing is said.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stand_in import run_again
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification
from unpadded_tiny import batch, config, gradients

import trainfit
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.speeding import facts_in

LENGTHS = ((9, 30, 20, 33), (40, 21, 17, 40), (50, 60, 61, 10), (33, 48, 64, 60))
LABELS = torch.tensor([0, 2, 1, 1])


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Counting:
    """Backend that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return aot_eager(graph, inputs)


def made(name: str = "bert", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config(name, dropout, hidden_size=64))


def compiling(model: Any, backend: Any) -> BodyGraphs:
    [facts] = facts_in(trainfit.unpadded(model.train()))
    facts.graphs = BodyGraphs(run_again, blocks=BodyBlocks(backend))
    return facts.graphs


def twins(name: str = "bert", backend: Any = None, dropout: float = 0.0) -> tuple[Any, Any, Any]:
    """An eager model and one with compiled blocks in graphs, of the same weights."""
    eager = trainfit.unpadded(made(name, dropout)).train()
    model = copy.deepcopy(eager)
    return eager, model, compiling(model, backend or aot_eager)


def inputs(name: str = "bert", at: int = 0) -> dict[str, Tensor]:
    return batch(name, lengths=LENGTHS[at % len(LENGTHS)], seed=at) | {"labels": LABELS}


def step(model: Any, given: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**given).loss
    loss.backward()
    return loss.detach()


def check_grads(model: Any, eager: Any) -> None:
    found, wanted = gradients(model), gradients(eager)
    assert found.keys() == wanted.keys()
    size = torch.cat([one.flatten() for one in wanted.values()]).norm()
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * size, name


def check_same(eager: Any, model: Any, steps: int = 14, name: str = "bert") -> None:
    for at in range(steps):
        for one in (eager, model):
            one.zero_grad()
        losses = [step(one, inputs(name, at)) for one in (model, eager)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        check_grads(model, eager)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("bert", 2),
        pytest.param("modernbert-cls", 4, marks=pytest.mark.soak),
        pytest.param("deberta-v3", 2, marks=pytest.mark.soak),
    ],
)
def test_one_compilation_takes_all_sizes_with_the_same_numbers(name: str, most: int) -> None:
    eager, model, graphs = twins(name, backend := Counting())
    check_same(eager, model, name=name)
    assert graphs.obstacle is None
    assert graphs.blocks.obstacle is None
    assert graphs.captured == len(LENGTHS)
    assert graphs.replayed >= 5
    assert 0 < backend.graphs <= most  # ModernBERT has two kinds of layers


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bert", "modernbert-cls"])
def test_inductor_has_the_same_numbers(name: str) -> None:
    eager, model, graphs = twins(name, "inductor")
    check_same(eager, model, name=name)
    assert graphs.blocks.obstacle is None
    assert graphs.replayed >= 5


@pytest.mark.soak
def test_nothing_of_it_stays_in_the_model(tmp_path: Path) -> None:
    eager, model, graphs = twins()
    check_same(eager, model, 6)
    assert all(one._compiled_call_impl is None for one in model.modules())
    assert model.state_dict().keys() == eager.state_dict().keys()
    model.save_pretrained(tmp_path)
    [facts] = facts_in(copy.deepcopy(model))
    assert facts.graphs is not None
    assert facts.graphs.blocks is not graphs.blocks
    with torch.no_grad():
        found = model.eval()(**inputs()).logits
        torch.testing.assert_close(found, eager.eval()(**inputs()).logits, rtol=1e-5, atol=1e-5)


def test_a_compiler_that_fails_leaves_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    called = []

    def fails(*_: Any) -> Any:
        called.append(1)
        raise RuntimeError("no such kernel")

    eager, model, graphs = twins(backend=fails)
    check_same(eager, model)
    assert "no such kernel" in (graphs.blocks.obstacle or "")
    assert caplog.text.count("no such kernel") == 1
    assert len(called) == 1
    assert graphs.obstacle is None
    assert graphs.replayed >= 5


def test_a_model_without_repeated_blocks_is_captured_as_it_is() -> None:
    eager, model, graphs = twins("albert")
    check_same(eager, model, 8, "albert")
    assert graphs.blocks.obstacle == "it has no repeated blocks"
    assert graphs.replayed


@pytest.mark.soak
def test_it_can_be_switched_and_the_other_graphs_freed() -> None:
    eager, model, graphs = twins()
    for off in (False, True):
        graphs.blocks.off = off
        check_same(eager, model, 8)
    both = graphs.captured
    graphs.keep(compiled=False)
    check_same(eager, model, 4)
    assert graphs.captured == both
    graphs.blocks.off = False
    check_same(eager, model, 1)
    assert graphs.captured == both + 1  # its sizes were seen, and its graphs are gone


@pytest.mark.soak
def test_accumulation_clipping_and_adapters() -> None:
    plain = made()
    lora = LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    eager = get_peft_model(trainfit.unpadded(plain), lora).train()
    model = copy.deepcopy(eager)
    graphs = compiling(model, aot_eager)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (eager, model)]
    for at in range(6):
        for one, optimizer in zip((eager, model), optimizers, strict=True):
            for part in range(2):
                step(one, inputs(at=2 * (at % 2) + part))
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
        check_grads(model, eager)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert graphs.replayed >= 4
    assert graphs.blocks is not None
    assert graphs.blocks.obstacle is None


def test_compiling_leaves_the_script_s_own_passes_and_random_numbers() -> None:
    """The first batch of each size may have two backward passes, which compiled code has not."""
    plain, model, graphs = twins(dropout=0.2)
    [facts] = facts_in(plain)
    facts.graphs = BodyGraphs(run_again)  # fills batches up, and so draws as many numbers
    for at in range(len(LENGTHS)):
        found = []
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(at)
            loss = one(**inputs(at=at)).loss
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(loss.detach())
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        check_grads(model, plain)
    assert graphs.blocks.obstacle is None
    assert graphs.replayed == 0


@pytest.mark.soak
def test_a_capture_that_fails_with_compiled_blocks_leaves_plain_ones() -> None:
    eager, model, graphs = twins()

    def record(work: Any) -> Any:
        if work.__self__.call.blocks is not None:
            raise RuntimeError("a kernel waits")
        return run_again(work)

    graphs.record = record
    check_same(eager, model)
    assert graphs.obstacle is None
    assert "a kernel waits" in (graphs.blocks.obstacle or "")
    assert graphs.replayed >= 4


@pytest.mark.soak
def test_gradients_of_gradients_go_without_it() -> None:
    eager, model, graphs = twins()
    weights = [one.bert.encoder.layer[0].output.dense.weight for one in (eager, model)]
    # Scaled dot-product attention has no second derivative in all its kernels.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check_same(eager, model, 6)
        found = []
        for one, weight in zip((eager, model), weights, strict=True):
            loss = one(**inputs()).loss
            [first] = torch.autograd.grad(loss, [weight], create_graph=True)
            [second] = torch.autograd.grad(first.square().sum(), [weight])
            found.append(second)
    assert (found[1] - found[0]).norm() <= 1e-4 * found[0].norm()
    assert "gradients of gradients" in (graphs.blocks.obstacle or "")


class Casts(TorchDispatchMode):
    """Counts the casts of each weight to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        half = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        if half and isinstance(args[0], nn.Parameter):
            self.counted[args[0].data_ptr()] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v3"])
def test_a_pass_casts_each_weight_once(name: str) -> None:
    model = made(name)
    [facts] = facts_in(trainfit.unpadded(model.train()))
    facts.graphs = graphs = BodyGraphs(run_again)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), Casts() as seen:
            model(**inputs(name))
        found = {seen.counted[one.data_ptr()] for one in model.base_model.encoder.parameters()}
        passes = 1 + (graphs.replayed == 1)  # it is captured and replayed in one step
        assert found - {0} == {passes}
    assert graphs.replayed == 2
