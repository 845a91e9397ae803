"""What each method trains, keeps and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_tiny import OTHERS, TINY, rows, tiny
from peft import PeftModel
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoModel

from trainfit.core.errors import BadInput
from trainfit.jobs.models.building import compilable_dora, projections
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.kernels.attention import lay_out
from trainfit.kernels.supported import NOT_RECOMPUTED
from trainfit.runtime import repeated_blocks

LABELS = torch.tensor([0, 2, 1, 1])


def step(model: EncoderClassifier, batch: dict[str, Tensor]) -> Tensor:
    """One backward pass; the gradients of everything that has one."""
    model.zero_grad()
    functional.cross_entropy(model(**batch), LABELS, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ── frozen (a frozen encoder still ran backward) ──────────────────────────────────────────────


@pytest.mark.parametrize("pooling", ["mean", "attention_query"])
def test_a_frozen_encoder_keeps_nothing_and_gets_nothing(pooling: str) -> None:
    model = tiny("gemma-3-1b-it", method="frozen", pooling=pooling)
    batch = rows().packed
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.encode(batch["input_ids"], lay_out(**batch))
        assert not hidden.requires_grad
        assert saved == []
        logits = model(**batch)
    weights = {p.untyped_storage().data_ptr() for p in model.encoder.parameters()}
    assert not weights & {tensor.untyped_storage().data_ptr() for tensor in saved}
    logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert all(p.grad is not None for p in (*model.head.parameters(), *model.pooler.parameters()))


def test_a_frozen_encoder_has_no_dropout_in_training() -> None:
    model = tiny("bert-base", method="frozen", attention_dropout=0.5, feed_forward_dropout=0.5)
    batch = rows().padded
    assert model.training
    assert torch.equal(model.train()(**batch), model.eval()(**batch))


# ── LoRA and DoRA (hand-written DoRA left embeddings, MLPs and norms trainable) ────────────────

WIDTHS = {  # in + out of every attention projection of a layer, written out by hand
    "bert-base": [32 + 32] * 4,
    "deberta-v3-base": [32 + 32] * 4,
    "modernbert-base": [32 + 96, 32 + 32],
    "gemma-3-1b-it": [32 + 32, 32 + 16, 32 + 16, 32 + 32],
    "gpt2": [32 + 96, 32 + 32],
}
OUTPUTS = {
    "bert-base": 32 * 4,
    "deberta-v3-base": 32 * 4,
    "modernbert-base": 96 + 32,
    "gemma-3-1b-it": 32 + 16 + 16 + 32,
    "gpt2": 96 + 32,
}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_only_adapters_pooler_and_head_are_trained(name: str, method: str) -> None:
    model = tiny(name, method=method, lora_rank=4, pooling="attention_kv")
    layers = 6 if name == "gemma-3-1b-it" else 3
    adapters = {n for n in trained(model) if ".lora_" in n}
    rest = {n.partition(".")[0] for n in trained(model) - adapters}
    assert rest == {"pooler", "head"}
    count = sum(p.numel() for n, p in model.named_parameters() if n in adapters)
    magnitudes = OUTPUTS[name] if method == "dora" else 0
    assert count == layers * (4 * sum(WIDTHS[name]) + magnitudes)
    assert len(projections(tiny(name).encoder)) == layers * len(WIDTHS[name])


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_fresh_adapters_change_nothing_and_then_learn(method: str) -> None:
    plain, adapted = tiny("gemma-3-1b-it"), tiny("gemma-3-1b-it", method=method)
    adapted.head.load_state_dict(plain.head.state_dict())
    batch = rows().packed
    torch.testing.assert_close(adapted(**batch), plain(**batch), rtol=1e-4, atol=1e-5)
    step(adapted, batch)
    without = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b-it"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_saved_adapters_load_in_peft(name: str, method: str, tmp_path: Path) -> None:
    base = tiny(name).eval()
    base.encoder.save_pretrained(tmp_path / "base")
    model = tiny(name, method=method).eval()
    for parameter in model.encoder.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    model.encoder.save_pretrained(tmp_path / "adapter")
    plain = AutoModel.from_pretrained(tmp_path / "base", attn_implementation="eager")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    batch = rows().padded
    real = batch["attention_mask"].bool()
    ours = model.encode(batch["input_ids"], lay_out(**batch))[real]
    torch.testing.assert_close(loaded(**batch).last_hidden_state[real], ours)
    theirs = base.encode(batch["input_ids"], lay_out(**batch))[real]
    assert not torch.allclose(ours, theirs, atol=1e-3)


def test_adapters_on_bf16_weights_stay_in_float32() -> None:
    with FakeTensorMode():  # some CPUs cannot multiply bf16
        model = tiny("gemma-3-1b-it", method="dora", dtype="bfloat16")
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    assert {kinds[n] for n in trained(model)} == {torch.float32}
    assert kinds["encoder.embed_tokens.weight"] == torch.bfloat16


@pytest.mark.parametrize("name", ["gemma-3-1b-it", "bert-base", "gpt2"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dora_is_what_peft_computes(name: str, dropout: float) -> None:
    """Values and gradients; GPT-2's weights are transposed, BERT's layers have biases."""
    model = tiny(name, method="dora", lora_dropout=dropout).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    layers = [module for module in model.modules() if type(module) is compilable_dora()]
    assert layers
    found = []
    for kind in (compilable_dora(), DoraLinearLayer):
        for layer in layers:
            layer.__class__ = kind
        torch.manual_seed(0)
        found.append(step(model, rows().packed))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.soak
def test_a_block_with_dora_is_one_graph() -> None:
    model = tiny("gemma-3-1b-it", method="dora", lora_dropout=0.1).train()
    batch = rows().packed
    blocks = repeated_blocks(model)
    seen: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    for block in blocks:
        block._compiled_call_impl = torch.compile(
            block._call_impl, backend=counting, fullgraph=True
        )
    try:
        step(model, batch)
    finally:
        torch.compiler.reset()
    assert 1 <= len(seen) <= 3  # with and without a window, and the first, whose input is frozen


def test_a_model_without_known_projections_is_refused() -> None:
    with pytest.raises(BadInput, match="full or frozen"):
        projections(nn.Sequential(nn.Linear(2, 2)))


# ── checkpointing ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["bert-base", "deberta-v3-base", "gemma-3-1b-it", "gpt2"])
@pytest.mark.parametrize("method", ["full", "dora"])
def test_checkpointing_keeps_less_and_computes_the_same(name: str, method: str) -> None:
    dropped = {"attention_dropout": 0.2, "feed_forward_dropout": 0.2, "lora_dropout": 0.2}
    kept, gradients = {}, {}
    for how in ("none", "selective", "full"):
        model = tiny(name, method=method, checkpointing=how, **dropped).double()
        held: list[int] = []

        def pack(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.numel())
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**rows().packed)
        kept[how] = sum(held)
        torch.manual_seed(3)
        gradients[how] = step(model, rows().packed)
    assert kept["full"] < kept["selective"] < kept["none"]
    torch.testing.assert_close(gradients["full"], gradients["none"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients["selective"], gradients["none"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OTHERS)
def test_every_family_has_adapters_on_its_attention_and_recomputes_or_says_that_it_cannot(
    name: str,
) -> None:
    model = tiny(name, method="lora")
    blocks = 1 if name == "albert-base-v2" else model.encoder.config.num_hidden_layers
    adapted = [key for key, one in model.named_parameters() if one.requires_grad and "lora" in key]
    assert len(adapted) in (blocks * 2 * 2, blocks * 4 * 2)  # two matrices for each projection
    step(model, rows().padded)
    if model.encoder.config.model_type in NOT_RECOMPUTED:
        with pytest.raises(BadInput, match="cannot compute the blocks"):
            tiny(name, checkpointing="full")
    else:
        plain, again = (step(tiny(name, checkpointing=c), rows().padded) for c in ("none", "full"))
        torch.testing.assert_close(again, plain)


# ── dropout ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("which", ["attention_dropout", "feed_forward_dropout"])
def test_each_dropout_acts_in_training_alone(name: str, which: str) -> None:
    model = tiny(name, **{which: 0.5})
    batch = rows().packed
    assert not torch.allclose(model(**batch), model(**batch))
    model.eval()
    assert torch.equal(model(**batch), model(**batch))
    assert set(model.state_dict()) == set(tiny(name).state_dict())


def test_without_a_setting_the_config_s_own_dropout_stays() -> None:
    unset: dict[str, Any] = {"attention_dropout": None, "feed_forward_dropout": None}
    config = tiny("bert-base", **unset).encoder.config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)
