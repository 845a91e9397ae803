"""The GPT against transformers' GPT-2 and against what the guide says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from trainfit.core.errors import BadInput
from trainfit.engine.optimizer import parameter_groups
from trainfit.hardware.model_shapes import model_shape
from trainfit.jobs.models.gpt_model import (
    Gpt,
    GptShape,
    build_gpt,
    gpt_shape,
    summed_cross_entropy,
)
from trainfit.jobs.standard_export import from_gpt2, to_gpt2

SMALL = GptShape(vocab_size=61, block_size=16, n_layer=3, n_head=4, n_embd=32)


def gpt(seed: int = 0, **arguments: Any) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(SMALL, **arguments).double()


def tokens(seed: int = 1, shape: tuple[int, int] = (3, 16)) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> Tensor:
    model.zero_grad()
    model(tokens(1), tokens(2)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-small", "gpt-medium", "gpt-124m"])
def test_the_number_of_parameters_is_the_catalogue_s(name: str) -> None:
    with torch.device("meta"):
        model = build_gpt(name)
    assert sum(p.numel() for p in model.parameters()) == model_shape(name).parameters
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_sizes_can_be_changed_and_are_checked() -> None:
    assert gpt_shape("gpt-tiny", block_size=64).block_size == 64
    with pytest.raises(BadInput, match="multiple of n_head"):
        gpt_shape("gpt-tiny", n_head=3)
    with pytest.raises(BadInput, match="n_layers"):
        gpt_shape("gpt-tiny", n_layers=3)
    with pytest.raises(BadInput, match="gpt-small"):
        gpt_shape("bert-base")


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(BadInput, match="17 tokens for a block size of 16"):
        gpt()(tokens(shape=(1, 17)))


# ── against transformers ──────────────────────────────────────────────────────────────────────


def test_it_is_a_gpt2_without_biases(tmp_path: Path) -> None:
    model = gpt().eval()
    to_gpt2(model).save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert isinstance(other, GPT2LMHeadModel)
    torch.testing.assert_close(other(tokens()).logits, model(tokens()), rtol=1e-12, atol=1e-12)
    back = from_gpt2(other)
    assert back.shape == model.shape
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight)


def test_its_loss_is_that_of_transformers() -> None:
    model = gpt().eval()
    ids = tokens()
    loss = model(ids[:, :-1], ids[:, 1:])
    wanted = to_gpt2(model).eval()(ids, labels=ids).loss
    torch.testing.assert_close(loss / (3 * 15), wanted.double())


def test_a_gpt2_that_computes_something_else_is_refused() -> None:
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4}
    published = GPT2LMHeadModel(GPT2Config(**sizes))
    published.transformer.h[0].mlp.c_fc.bias.data += 1
    with pytest.raises(BadInput, match="biases, activation gelu_new"):
        from_gpt2(published)


# ── what the guide says ───────────────────────────────────────────────────────────────────────


def test_no_token_sees_a_later_one() -> None:
    model = gpt().eval()
    ids, other = tokens(), tokens()
    other[:, 9:] = (other[:, 9:] + 1) % 61
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_weights_start_as_gpt_2_s() -> None:
    torch.manual_seed(0)
    model = Gpt(GptShape(vocab_size=500, block_size=64, n_layer=8, n_head=4, n_embd=128))
    wanted = dict.fromkeys(dict(model.named_parameters()), 0.02)
    for name in wanted:
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            wanted[name] = 0.02 / math.sqrt(2 * 8)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert weight.std().item() == pytest.approx(wanted[name], rel=0.03)
        else:
            assert torch.equal(weight, torch.ones_like(weight))


def test_matrices_decay_and_norms_do_not() -> None:
    model = gpt()
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(kept["params"]) == 2 * 3 + 1
    assert len(decayed["params"]) == 2 + 4 * 3
    assert sum(p.numel() for g in (decayed, kept) for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    torch.optim.AdamW([decayed, kept])


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    model = Gpt(GptShape(vocab_size=61, block_size=16, n_layer=1, n_head=4, n_embd=32, dropout=0.5))
    assert not torch.allclose(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


# ── the same with less memory ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["selective", "full"])
def test_checkpointing_computes_the_same_gradients(how: str) -> None:
    torch.testing.assert_close(
        gradients(gpt(checkpointing=how)), gradients(gpt()), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 100])
def test_a_chunked_loss_has_the_same_gradients(chunk: int) -> None:
    torch.testing.assert_close(
        gradients(gpt(loss_chunk=chunk)), gradients(gpt()), rtol=1e-9, atol=1e-12
    )


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_a_chunked_loss_never_holds_all_logits() -> None:
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    targets = torch.randint(0, 500, (64,))
    with Largest() as chunked:
        summed_cross_entropy(hidden, weight, targets, chunk=10).backward()
    with Largest() as whole:
        summed_cross_entropy(hidden, weight, targets).backward()
    assert chunked.elements == 10 * 500
    assert whole.elements == 64 * 500


def test_the_plain_loss_is_cross_entropy() -> None:
    model = gpt()
    logits = model(tokens(1)).flatten(0, 1)
    wanted = functional.cross_entropy(logits, tokens(2).flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens(1), tokens(2)), wanted)


def test_a_step_on_fake_tensors_and_in_one_graph() -> None:
    with FakeTensorMode():
        model = build_gpt("gpt-small", checkpointing="full", loss_chunk=512)
        ids = torch.zeros(2, 1024, dtype=torch.long)
        model(ids, ids).backward()
    torch.compiler.reset()
    small = gpt(loss_chunk=20)
    compiled = torch.compile(small, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens(1), tokens(2)), small(tokens(1), tokens(2)))
    torch.compiler.reset()
