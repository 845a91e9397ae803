"""The encoder sees both ways and only its own sequence, and is the model transformers has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs_tiny import CONFIGS, DECODERS, OTHERS, TINY, rows, rows_of, tiny
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from trainfit.core.errors import BadInput
from trainfit.jobs.models.classifier import EncoderClassifier
from trainfit.kernels.attention import lay_out
from trainfit.kernels.unpadded_rows import without_padding

FAMILIES = (*TINY, *CONFIGS, *OTHERS)


def hidden_states(model: EncoderClassifier, **batch: Tensor) -> Tensor:
    return model.encode(batch["input_ids"], lay_out(**batch))


def gradient(model: EncoderClassifier, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
    model.zero_grad()
    functional.cross_entropy(model(**batch), labels, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ── both ways (a "bidirectional" wrapper that was never assigned stayed causal) ────────────────


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_token_changes_earlier_outputs(name: str) -> None:
    model = tiny(name).eval()
    ids = rows((9,)).padded["input_ids"]  # three windowed layers carry a change so far
    other = ids.clone()
    other[0, -1] += 1
    before, after = hidden_states(model, input_ids=ids), hidden_states(model, input_ids=other)
    changed = (before - after).abs().amax(-1)[0]
    assert changed.min() > 1e-6


@pytest.mark.parametrize("name", DECODERS)
def test_with_padding_and_packed_too(name: str) -> None:
    model = tiny(name).eval()
    batch = rows((12, 7))
    for form in (batch.padded, batch.packed):
        other = form | {"input_ids": form["input_ids"].clone()}
        other["input_ids"].flatten()[11] += 1
        changed = (hidden_states(model, **form) - hidden_states(model, **other)).abs().amax(-1)
        assert changed.flatten()[0] > 1e-6


# ── one sequence, whatever stands beside it ───────────────────────────────────────────────────


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_and_packed_are_as_each_alone(name: str) -> None:
    model = tiny(name).eval()
    batch = rows()
    alone = torch.cat([model(s[None]) for s in batch.sequences])
    torch.testing.assert_close(model(**batch.padded), alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(**batch.packed), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_and_packed_gradients_agree(name: str) -> None:
    model = tiny(name)
    batch = rows((5, 17, 1, 9, 30))
    labels = torch.tensor([0, 2, 1, 1, 0])
    padded, packed = (gradient(model, form, labels) for form in (batch.padded, batch.packed))
    assert torch.linalg.norm(padded - packed) < 1e-5 * torch.linalg.norm(padded)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_packed_sequence_never_changes_another(name: str) -> None:
    model = tiny(name).eval()
    batch = rows((5, 17, 6, 9))
    other = batch.packed | {"input_ids": batch.packed["input_ids"].clone()}
    other["input_ids"][0, 5:22] = 7
    other["input_ids"][0, 37:] = 8  # the filler as well
    before, after = model(**batch.packed), model(**other)
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [True, False, True, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_may_stand_left_and_hold_anything(name: str) -> None:
    model = tiny(name).eval()
    right = rows().padded
    left = {key: torch.zeros_like(value) for key, value in right.items()}
    for row, length in enumerate(right["attention_mask"].sum(-1).tolist()):
        left["attention_mask"][row, -length:] = 1
        left["input_ids"][row] = 77
        left["input_ids"][row, -length:] = right["input_ids"][row, :length]
    torch.testing.assert_close(model(**left), model(**right), rtol=1e-4, atol=1e-5)


def test_far_padding_makes_no_nan() -> None:
    model = tiny("gemma-3-1b-it")
    batch = rows((2, 30)).padded  # padding that no window of 4 reaches from a real token
    assert gradient(model, batch, torch.tensor([0, 1])).isfinite().all()


def test_token_types_reach_the_model_that_has_them() -> None:
    ids = rows((9,)).padded["input_ids"]
    second = torch.ones_like(ids)
    bert, roberta = tiny("bert-base").eval(), tiny("phobert-base-v2").eval()
    assert not torch.allclose(bert(ids, token_type_ids=second), bert(ids))
    assert torch.equal(roberta(ids, token_type_ids=second), roberta(ids))


def test_a_fixed_number_of_sequences_may_end_in_empty_ones() -> None:
    model = tiny("gemma-3-1b-it").eval()
    batch = rows((5, 9))
    starts = batch.packed["cu_seqlens"]
    longer = batch.packed | {"cu_seqlens": torch.cat([starts, starts[-1:], starts[-1:]])}
    logits = model(**longer)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:2], model(**batch.packed))


# ── padding on a CPU ──────────────────────────────────────────────────────────────────────────


def tokens_of_products(model: EncoderClassifier, batch: dict[str, Tensor]) -> set[int]:
    """Numbers of tokens that the linear layers of the encoder compute."""
    seen: set[int] = set()

    def note(_module: nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> None:
        seen.add(given[0].flatten(0, -2).shape[0])

    layers = [m for m in model.encoder.modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["bert-base", "modernbert-base", "gemma-2-2b", "gpt2", "mistral"])
def test_products_have_no_padding_on_a_cpu(name: str) -> None:
    model, reference = tiny(name), tiny(name, attention="masked")
    batch, labels = rows((5, 17, 1, 9)).padded, torch.tensor([0, 2, 1, 1])
    if name != "gpt2":  # its layers are of another class
        assert tokens_of_products(model, batch) == {5 + 17 + 1 + 9}
        assert tokens_of_products(reference, batch) == {4 * 17}
    found, wanted = (gradient(one, batch, labels) for one in (model, reference))
    assert torch.linalg.norm(found - wanted) < 1e-5 * torch.linalg.norm(wanted)


def test_short_rows_are_attended_in_groups_of_their_own() -> None:
    lengths, labels = (3, 30, 4, 28, 2, 3, 12, 5), torch.tensor([0, 2, 1, 1, 0, 0, 2, 1])
    for name in ("modernbert-base", "gemma-2-2b", "mistral"):
        batch = rows(lengths).padded
        found = without_padding(lay_out(**batch), None, causal=False)
        assert found is not None
        widths = [(group.rows.rows, group.rows.width) for group in found[1].groups]
        assert widths == [(2, 30), (6, 12)]  # a third group would save little
        model, reference = tiny(name), tiny(name, attention="masked")
        one, other = (gradient(each, batch, labels) for each in (model, reference))
        assert torch.linalg.norm(one - other) < 1e-5 * torch.linalg.norm(other)


def test_a_little_padding_is_computed() -> None:
    assert tokens_of_products(tiny("bert-base"), rows((10, 10, 10, 9)).padded) == {40}


def test_compiled_blocks_keep_their_shapes() -> None:
    model = tiny("bert-base")
    block = model.encoder.get_submodule("encoder.layer.0")
    block.compile(backend="eager")
    assert tokens_of_products(model, rows((5, 17, 1, 9)).padded) == {4 * 17}


def test_rows_that_contradict_themselves_are_refused() -> None:
    batch = rows()
    with pytest.raises(BadInput, match="both"):
        lay_out(batch.packed["input_ids"], attention_mask=torch.ones(1), cu_seqlens=torch.ones(2))
    with pytest.raises(BadInput, match="one row"):
        lay_out(batch.padded["input_ids"], cu_seqlens=batch.packed["cu_seqlens"])


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    model = tiny("phobert-base-v2")  # 42 positions, of which two stand for padding
    model(rows((40,)).padded["input_ids"])
    with pytest.raises(BadInput, match="40 or less"):
        model(rows((41,)).padded["input_ids"])
    with pytest.raises(BadInput, match="40 or less"):
        model(**rows((41, 9)).packed, max_seqlen=41)
    model(**rows((30, 30)).packed)


def test_nor_one_longer_than_a_table_that_begins_later() -> None:
    model = tiny("opt-125m")  # 40 positions after two rows that stand for none
    model(rows((40,)).padded["input_ids"])
    with pytest.raises(BadInput, match="40 or less"):
        model(rows((41,)).padded["input_ids"])


# ── the model transformers has ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_it_is_the_same_model_in_plain_transformers(name: str, tmp_path: Path) -> None:
    model = tiny(name).eval()
    model.encoder.save_pretrained(tmp_path)
    pad = model.encoder.config.pad_token_id or 0
    batch = rows_of(rows().sequences, pad=pad)
    mask = batch.padded["attention_mask"]
    plain = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    wanted = plain(**batch.padded).last_hidden_state[mask.bool()]
    torch.testing.assert_close(hidden_states(model, **batch.padded)[mask.bool()], wanted)
    packed = hidden_states(model, **batch.packed)[0, : len(wanted)]
    torch.testing.assert_close(packed, wanted)


def test_gemma_2_without_its_soft_cap_would_be_another_model() -> None:
    ids = rows((12,)).padded["input_ids"]
    capped = tiny("gemma-2-2b").eval()
    free = tiny("gemma-2-2b", overrides=TINY["gemma-2-2b"] | {"attn_logit_softcapping": None})
    free.load_state_dict(capped.state_dict())
    assert not torch.allclose(capped(ids), free.eval()(ids), atol=1e-3)


@pytest.mark.parametrize("name", ["gemma-3-1b-it", "llama", "qwen3", "gpt2"])
def test_last_token_logits_are_those_of_the_sequence_classifier(name: str, tmp_path: Path) -> None:
    model = tiny(name, pooling="last").eval()
    model.encoder.config.pad_token_id = 0
    model.encoder.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        plain.score.weight.copy_(model.head.weight)
    batch = rows()
    torch.testing.assert_close(model(**batch.padded), plain(**batch.padded).logits)
    torch.testing.assert_close(model(**batch.packed), plain(**batch.padded).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_keep_their_names(name: str) -> None:
    model = tiny(name)
    with torch.device("meta"):
        plain = AutoModel.from_config(model.encoder.config)
    named = {f"encoder.{key}" for key in plain.state_dict() if not key.startswith("pooler.")}
    assert set(model.state_dict()) == named | {"head.weight", "head.bias"}
