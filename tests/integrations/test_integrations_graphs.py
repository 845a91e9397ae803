"""Replayed passes give the numbers of eager ones, whatever the script does around them.

Without a GPU a stand-in takes the place of CUDA's graphs: it runs the same functions on the same
fixed memory again.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stand_in import run_again
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from unpadded_tiny import HEADS, batch, config, gradients

import trainfit
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.captured_passes import GradientMemory
from trainfit.integrations.speeding import facts_in

FIRST, LAST, WIDE = (5, 11, 1, 8), (9, 2, 7, 10), (30, 40, 20, 33)
LABELS = torch.tensor([0, 2, 1, 1])


def graphed(model: Any) -> BodyGraphs:
    [facts] = facts_in(trainfit.unpadded(model))
    facts.graphs = BodyGraphs(run_again)
    return facts.graphs


def twins(name: str = "bert", head: str = "classes", **others: Any) -> tuple[Any, Any, BodyGraphs]:
    """An eager model and one with graphs, of the same weights, both without padding."""
    torch.manual_seed(0)
    eager = trainfit.unpadded(HEADS[head].from_config(config(name, **others))).train()
    model = copy.deepcopy(eager)
    return eager, model, graphed(model)


def inputs(
    name: str = "bert", lengths: tuple[int, ...] = FIRST, seed: int = 1
) -> dict[str, Tensor]:
    return batch(name, lengths=lengths, seed=seed) | {"labels": LABELS}


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


# ── the same numbers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["bert", "modernbert-cls", "deberta-v3", "mpnet", "albert", "llama", "gemma-2"]
)
def test_losses_and_gradients_are_those_of_eager_passes(name: str) -> None:
    eager, model, graphs = twins(name)
    for at, lengths in enumerate((FIRST, LAST, FIRST, WIDE, LAST, WIDE, FIRST, WIDE)):
        given = inputs(name, lengths, seed=at)
        for one in (eager, model):
            one.zero_grad()
        torch.testing.assert_close(step(model, given), step(eager, given), rtol=1e-6, atol=1e-6)
        check_grads(model, eager)
    # Twice a size is new, and so are once the small ones at the longer bound.
    assert graphs.replayed >= 5
    assert graphs.obstacle is None


def test_batches_of_ever_other_sizes_are_replayed_soon() -> None:
    eager, model, graphs = twins(max_position_embeddings=256)
    draw, sizes = torch.Generator().manual_seed(0), set()
    for at in range(60):
        drawn = (60 + 18 * torch.randn(4, generator=draw)).clamp(8, 128).int().tolist()
        sizes.add(-(-sum(drawn) // 32))
        given = inputs("bert", tuple(drawn), seed=at)
        torch.testing.assert_close(step(model, given), step(eager, given), rtol=1e-6, atol=1e-6)
    assert len(sizes) > 4
    assert graphs.replayed >= 50
    assert graphs.captured <= 5


def test_a_size_that_comes_often_gets_a_graph_of_its_own() -> None:
    _, model, graphs = twins(max_position_embeddings=256)
    large, small = (100, 100, 90, 89), (80, 80, 80, 80)  # of 379 tokens, and of 320
    for at in range(4):
        step(model, inputs("bert", large, seed=at))
    before = graphs.captured
    for at in range(40):
        step(model, inputs("bert", small, seed=at))
    assert (before, graphs.captured) == (1, 2)
    assert graphs.eager == 1 + 1
    assert {one.tokens for lane in graphs._lanes for one in lane.graphs} == {384, 320}


@pytest.mark.parametrize(("name", "head"), [("bert", "tokens"), ("bert", "body")])
def test_other_heads(name: str, head: str) -> None:
    eager, model, graphs = twins(name, head)
    for at in range(5):
        given = batch(name, seed=at)
        if head == "tokens":
            given["labels"] = torch.where(given["attention_mask"] == 1, 1, -100)
        for one in (eager, model):
            found = one(**given)
            real = given["attention_mask"].bool()
            loss = found.loss if head == "tokens" else found.last_hidden_state[real].square().sum()
            loss.backward()
        check_grads(model, eager)
    assert graphs.replayed >= 3


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_are_clipped_and_zeroed(to_none: bool) -> None:
    eager, model, graphs = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (eager, model)]
    for at in range(6):
        for one in (eager, model):
            for part in range(3):
                step(one, inputs(seed=3 * at + part))
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        check_grads(model, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert graphs.replayed == 17


def test_a_gradient_that_is_kept_is_not_overwritten() -> None:
    _, model, _ = twins()
    kept = []
    for seed in range(4):
        model.zero_grad()
        step(model, inputs(seed=seed))
        weight = model.bert.embeddings.LayerNorm.weight
        kept.append((weight.grad, weight.grad.clone()))
    for gradient, was in kept:
        assert torch.equal(gradient, was)


def memory(graphs: BodyGraphs) -> GradientMemory:
    assert graphs._targets is not None
    return graphs._targets


def lent(model: Any, graphs: BodyGraphs) -> int:
    """Count the weights whose gradient is in the memory of the graphs."""
    here = {part.data_ptr() for part in memory(graphs).parts}
    return sum(one.data_ptr() in here for one in gradients(model).values())


def test_gradients_are_not_copied_while_nobody_else_holds_them() -> None:
    eager, model, graphs = twins()
    for seed in range(6):
        for one in (eager, model):
            one.zero_grad()
            step(one, inputs(seed=seed))
        check_grads(model, eager)
        if graphs.replayed:
            assert lent(model, graphs) == len(memory(graphs).parts) - 2  # the pooler's are eager
    for one in (eager, model):  # accumulated from here on
        step(one, inputs(seed=7))
    check_grads(model, eager)
    assert lent(model, graphs) == 0
    for one in (eager, model):
        one.zero_grad()
        step(one, inputs(seed=8))
    assert lent(model, graphs) == 0


def test_a_part_of_a_gradient_that_is_kept_is_not_overwritten() -> None:
    """A view has another address, and its gradient's name is not known."""
    _, model, _ = twins()
    kept = []
    for seed in range(5):
        model.zero_grad()
        step(model, inputs(seed=seed))
        part = model.bert.encoder.layer[0].output.dense.weight.grad[3:].T
        kept.append((part, part.clone()))
    for part, was in kept:
        assert torch.equal(part, was)


def test_weights_of_several_kinds_have_memory_each() -> None:
    _, model, _ = twins()
    model.bert.encoder.layer[1].double()
    parts = GradientMemory(list(model.bert.encoder.parameters())).parts
    assert {part.dtype for part in parts} == {torch.float32, torch.float64}
    shapes = [one.shape for one in model.bert.encoder.parameters()]
    assert [part.shape for part in parts] == shapes


def test_hidden_states_that_are_kept_are_not_overwritten() -> None:
    _, model, graphs = twins(head="body")
    rows = batch("bert", "none")
    for seed in range(4):
        found = model(**batch("bert", "none", seed=seed)).last_hidden_state
        if seed == 2:
            kept, was = found, found.clone()
        found.sum().backward()
    model(**rows)
    assert graphs.replayed
    assert torch.equal(kept, was)


def test_dropout_draws_anew_and_as_eager_filled_passes_do() -> None:
    _, model, graphs = twins(dropout=0.3)
    drawn = [step(model, inputs()) for _ in range(4)]
    assert graphs.replayed == 3
    assert len({one.item() for one in drawn}) == 4


def test_autocast_is_that_of_the_call() -> None:
    eager, model, graphs = twins()
    for at in range(3):
        for enabled in (True, False):
            for one in (eager, model):
                one.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled):
                    loss = one(**inputs(seed=at)).loss
                loss.backward()
            size = torch.cat([one.flatten() for one in gradients(eager).values()]).norm()
            for name, gradient in gradients(model).items():
                limit = 3e-2 if enabled else 1e-6
                assert (gradient - gradients(eager)[name]).norm() <= limit * size
    assert graphs.replayed == 4


# ── what a graph's memory cannot serve ────────────────────────────────────────────────────────


def test_two_forward_passes_before_a_backward_pass() -> None:
    eager, model, graphs = twins()
    for at in range(4):
        for one in (eager, model):
            one.zero_grad()
            (one(**inputs(seed=at)).loss * one(**inputs(lengths=LAST, seed=at)).loss).backward()
        check_grads(model, eager)
    assert graphs.replayed == 7
    assert graphs.captured == 2


def test_many_forward_passes_before_a_backward_pass(caplog: pytest.LogCaptureFixture) -> None:
    eager, model, graphs = twins()
    for _ in range(2):
        for one in (eager, model):
            one.zero_grad()
            sum(one(**inputs(seed=at)).loss * at for at in range(7)).backward()
        check_grads(model, eager)
    assert graphs.replayed == 4 + 4
    assert caplog.text.count("more than 4 forward passes") == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_the_script_checkpoints(reentrant: bool) -> None:
    """The second forward pass must draw the dropout of the first."""
    eager, model, graphs = twins(head="body", dropout=0.3)
    rows = batch("bert")
    real = rows["attention_mask"].bool()

    def summed(one: Any, factor: Tensor) -> Tensor:
        found: Tensor = one(**rows).last_hidden_state[real].sin().sum() * factor
        return found

    for seed in range(3):
        for one in (eager, model):
            one.zero_grad()
            torch.manual_seed(seed)
            factor = torch.ones((), requires_grad=True)
            checkpoint(summed, one, factor, use_reentrant=reentrant).backward()
        check_grads(model, eager)
    assert graphs.replayed == 0
    assert graphs.obstacle is None


def test_a_pass_without_a_backward_pass_is_forgotten() -> None:
    _, model, graphs = twins()
    for _ in range(5):
        model(**inputs())
    assert graphs.replayed == 4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_two_backward_passes_through_one_forward_pass(dropout: float) -> None:
    _, model, graphs = twins(dropout=dropout)
    for _ in range(3):
        model.zero_grad()
        loss = model(**inputs()).loss
        loss.backward(retain_graph=True)
        once = {name: gradient.clone() for name, gradient in gradients(model).items()}
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-4, atol=1e-6)
    assert graphs.replayed == 2


def test_gradients_of_gradients() -> None:
    eager, model, graphs = twins()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        for _ in range(3):
            for one in (eager, model):
                one.zero_grad()
                weight = one.bert.embeddings.LayerNorm.weight
                [first] = torch.autograd.grad(one(**inputs()).loss, weight, create_graph=True)
                first.square().sum().backward()
            check_grads(model, eager)
    assert graphs.replayed == 2


# ── changes of the model ──────────────────────────────────────────────────────────────────────


def _load(model: Any) -> None:
    model.load_state_dict({name: one + 0.01 for name, one in model.state_dict().items()})


def _replace_data(model: Any) -> None:
    for weight in model.parameters():
        weight.data = weight.data + 0.01


def _freeze(model: Any) -> None:
    model.bert.embeddings.requires_grad_(False)


def _freeze_all(model: Any) -> None:
    model.bert.requires_grad_(False)


def _replace_layer(model: Any) -> None:
    torch.manual_seed(5)
    model.bert.encoder.layer[0].output.dense = nn.Linear(48, 32)


def _to_double(model: Any) -> None:
    model.double()


@pytest.mark.parametrize(
    "change", [_load, _replace_data, _freeze, _freeze_all, _replace_layer, _to_double]
)
def test_changes_of_the_weights_are_seen(change: Callable[[Any], None]) -> None:
    eager, model, graphs = twins(intermediate_size=48)
    for at in range(6):
        for one in (eager, model):
            one.zero_grad(set_to_none=True)
            if at == 3:
                change(one)
        torch.testing.assert_close(
            step(model, inputs(seed=at)), step(eager, inputs(seed=at)), rtol=1e-6, atol=1e-6
        )
        check_grads(model, eager)
    assert graphs.replayed == (5 if change is _load else 4)


def test_weights_that_change_in_every_step_end_it(caplog: pytest.LogCaptureFixture) -> None:
    _, model, graphs = twins()
    for at in range(20):
        if at % 3 == 0:
            _replace_data(model)
        step(model, inputs(seed=at))
    assert "again and again" in (graphs.obstacle or "")
    assert caplog.text.count("again and again") == 1


def test_layers_may_be_unfrozen_one_after_the_other() -> None:
    _, model, graphs = twins()
    model.bert.requires_grad_(False)
    for layer in [one for one in model.bert.modules() if isinstance(one, nn.Linear)][:6]:
        layer.requires_grad_(True)
        for seed in range(22):
            step(model, inputs(seed=seed))
    assert graphs.captured == 6
    assert graphs.obstacle is None


def test_adapters_of_peft() -> None:
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_config(config("bert")).train()
    lora = LoraConfig(target_modules=["query", "value"], init_lora_weights=False, lora_dropout=0.0)
    eager: Any = get_peft_model(trainfit.unpadded(plain), lora)
    model = copy.deepcopy(eager)
    graphs = graphed(model)
    for at in range(4):
        for one in (eager, model):
            one.zero_grad()
        assert step(model, inputs(seed=at)) == pytest.approx(
            step(eager, inputs(seed=at)).item(), abs=1e-6
        )
        check_grads(model, eager)
    assert graphs.replayed == 3
    with model.disable_adapter(), eager.disable_adapter():
        torch.testing.assert_close(model(**inputs()).loss, eager(**inputs()).loss)


# ── eager passes ──────────────────────────────────────────────────────────────────────────────


def test_evaluation_and_other_calls_go_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    eager, model, graphs = twins()
    for _ in range(3):
        step(model, inputs())
    replayed = graphs.replayed
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs()).loss, eager(**inputs()).loss)
    embedded = model.bert.embeddings.word_embeddings(inputs()["input_ids"])
    rest = {name: value for name, value in inputs().items() if name != "input_ids"}
    model(inputs_embeds=embedded, **rest)
    torch.testing.assert_close(
        model.eval()(**inputs()).loss, eager.eval()(**inputs()).loss, rtol=1e-6, atol=1e-6
    )
    model.train()
    assert graphs.replayed == replayed
    assert caplog.text.count("the argument inputs_embeds") == 1
    step(model, inputs())
    assert graphs.replayed == replayed + 1
    for one in (eager.train(), model):  # watched, with padding
        one(**inputs(), output_hidden_states=True).loss.backward()
    wanted = eager(**inputs(), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(
        model(**inputs(), output_hidden_states=True).hidden_states[1], wanted
    )
    assert caplog.text.count("hidden states are asked for") == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.bert.encoder.layer[0].register_forward_hook(lambda *_: None), "a hook on"),
        (lambda m: m.gradient_checkpointing_enable(), "gradient checkpointing is on"),
        (lambda m: m.bert.encoder.layer[0].compile(backend="eager"), "is compiled"),
        (lambda m: m.compile(backend="eager"), None),
    ],
)
def test_models_that_cannot_be_captured(
    change: Callable[[Any], Any], why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    eager, model, graphs = twins()
    change(model)
    for at in range(4):
        for one in (eager, model):
            one.zero_grad()
        assert step(model, inputs(seed=at)) == pytest.approx(
            step(eager, inputs(seed=at)).item(), abs=1e-6
        )
        check_grads(model, eager)
    assert graphs.replayed == 0
    assert why is None or caplog.text.count(why) == 1


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("full"), "memory ran out"),
        (RuntimeError("no capture"), "no capture"),
    ],
)
def test_a_capture_that_fails_leaves_eager_steps(error: Exception, why: str) -> None:
    eager, model, graphs = twins()

    def fail(_: Callable[[], None]) -> Callable[[], None]:
        raise error

    graphs.record = fail
    for at in range(4):
        torch.testing.assert_close(step(model, inputs(seed=at)), step(eager, inputs(seed=at)))
    check_grads(model, eager)
    assert why in (graphs.obstacle or "")


def test_copies_begin_without_graphs() -> None:
    _, model, graphs = twins()
    for _ in range(3):
        step(model, inputs())
    assert graphs.replayed
    graphs.record = None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        [facts] = facts_in(other)
        assert facts.graphs is not None
        assert facts.graphs.replayed == 0
        assert facts.graphs is not graphs


def test_a_trainer_has_the_losses_of_eager_steps(tmp_path: Path) -> None:
    found = []
    eager, model, graphs = twins()
    rows = [inputs(lengths=FIRST + LAST + (3, 4, 5, 11))]
    made = batch("bert", lengths=FIRST + LAST + (3, 4, 5, 11))
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(at % 3)}
        for at, (ids, mask) in enumerate(zip(*made.values(), strict=True))
    ]
    for one in (eager, model):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=8, logging_steps=1, per_device_train_batch_size=4, seed=1,
            gradient_accumulation_steps=2, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        trainer = Trainer(model=one, args=arguments, train_dataset=rows, eval_dataset=rows[:5])
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert graphs.replayed >= 8
