"""`unpadded` gives the outputs, losses and gradients of the padded model, from packed rows."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding
from unpadded_tiny import HEADS, NAMES, SIDES, batch, check_same, config, counting_packed, pair

from trainfit.integrations.speeding import FAMILIES
from trainfit.kernels import unpadded_rows
from trainfit.kernels.attention import Layout, masked_attention

_FIRST = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert")
READS_FIRST = (*_FIRST, "deberta-v3", "deberta", "mpnet", "modernbert-cls")
ENCODERS = (*READS_FIRST, "modernbert-mean")


def test_every_family_that_is_taken_is_compared_here() -> None:
    assert {pair(name)[0].config.model_type for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_classifiers_are_the_padded_ones(name: str) -> None:
    plain, model = pair(name)
    labels = torch.tensor([0, 2, 1, 1])
    for side in SIDES:
        rows = batch(name, side)
        packed = check_same(plain, model, rows | {"labels": labels})
        # The head would read what the padded model makes of padding.
        own = side in ("left", "both") and name in READS_FIRST
        assert packed == ([] if own else [int(rows["attention_mask"].sum())]), side


def test_positions_of_mpnet_are_its_own_whatever_the_padding_id() -> None:
    plain, model = pair("mpnet", pad_token_id=0)
    assert check_same(plain, model, batch("bert"))


def _labels(rows: dict[str, torch.Tensor], head: str, first: bool = False) -> torch.Tensor:
    """Labels of all real tokens; for a causal model not of the first ones, unless `first`."""
    real = rows["attention_mask"].bool()
    labels = torch.where(real, rows["input_ids"] % (3 if head == "tokens" else 90), -100)
    if head == "causal" and not first:
        labels[torch.arange(len(real)), real.int().argmax(-1)] = -100
    labels[1, 4] = -100
    return labels


def _has(name: str, head: str) -> bool:
    if head in ("masked", "causal") and (name in ENCODERS) != (head == "masked"):
        return False
    return type(config(name)) in HEADS[head]._model_mapping


PER_TOKEN = [(name, head) for name in NAMES for head in HEADS if head != "classes"]
QUICK = ("bert", "roberta", "deberta-v3", "modernbert-cls", "llama")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(*one, marks=() if one[0] in QUICK else pytest.mark.soak)
        for one in PER_TOKEN
        if _has(*one)
    ],
)
def test_models_with_a_result_per_token_are_the_padded_ones(name: str, head: str) -> None:
    plain, model = pair(name, head)
    for side in SIDES:
        rows = batch(name, side)
        call: dict[str, Any] = {} if head == "body" else {"labels": _labels(rows, head)}
        if head == "causal" or name not in ENCODERS:
            call["use_cache"] = False
        packed = check_same(plain, model, rows, **call)
        pooled = getattr(plain.base_model, "pooler", None) is not None
        own = pooled and side in ("left", "both")
        assert packed == ([] if own else [int(rows["attention_mask"].sum())]), side


@cache
def _kept(name: str, head: str) -> tuple[Any, Any]:
    return pair(name, head)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    side=st.sampled_from(SIDES),
    case=st.sampled_from([("bert", "masked"), ("llama", "classes"), ("deberta-v3", "tokens")]),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths: list[int], side: str, case: tuple[str, str], seed: int) -> None:
    rows = batch(case[0], side, tuple(lengths), seed)
    assert check_same(*_kept(*case), rows) == [int(rows["attention_mask"].sum())]


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "deberta-v3", "gpt2", "llama"])
def test_what_else_goes_into_a_call(name: str) -> None:
    plain, model = pair(name, "tokens")
    rows = batch(name)
    mask = rows["attention_mask"]
    embedded = plain.get_input_embeddings()(rows["input_ids"]).detach()
    places = (torch.arange(mask.shape[1]) + 3).expand_as(mask)
    calls: list[dict[str, Any]] = [
        rows | {"position_ids": places},
        rows | {"position_ids": places[:1]},
        rows | {"output_hidden_states": True},
        {"inputs_embeds": embedded, "attention_mask": mask},
        {"input_ids": rows["input_ids"]},
        rows | {"attention_mask": mask.bool()},
        rows | {"attention_mask": mask.float()},
        {"input_ids": rows["input_ids"][:, :1], "attention_mask": mask[:, :1]},
    ]
    if name in ("bert", "albert"):
        calls.append(rows | {"token_type_ids": (places > 6).long()})
    for call in calls:
        assert check_same(plain, model, call), call.keys()
    found, wanted = (one(**rows, return_dict=False) for one in (model, plain))
    assert type(found) is tuple
    assert len(found) == len(wanted)


def test_a_pooled_body_and_its_hidden_states() -> None:
    for name in ("bert", "albert"):
        plain, model = pair(name, "body")
        assert check_same(plain, model, batch(name), output_hidden_states=True)
        assert plain(**batch(name)).pooler_output is not None


@pytest.mark.parametrize("name", ["bert", "modernbert-cls", "llama", "gemma-3"])
def test_rows_that_a_kernel_takes_are_the_packed_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for the kernels of a GPU: attention with a mask of blocks, on the whole row."""
    taken: list[int] = []

    def attention(
        layout: Layout, window: int | None, _dtype: Any, *, causal: bool, kernel: str
    ) -> Any:
        assert kernel == "varlen"
        taken.append(layout.max_seqlen)
        return masked_attention(layout, window, causal=causal)

    monkeypatch.setattr(unpadded_rows, "packed_kernel", lambda *_, **__: ("varlen", ""))
    monkeypatch.setattr(unpadded_rows.varlen, "varlen_attention", attention)
    for head, side in (("classes", "right"), ("body", "both")):
        check_same(
            *pair(name, head),
            batch(name, side),
            **({"use_cache": False} if name in ("llama", "gemma-3") else {}),
        )
    assert taken
    assert set(taken) == {11}


# ── calls that go the model's own way ─────────────────────────────────────────────────────────


def _hole(rows: dict[str, Any]) -> dict[str, Any]:
    mask = rows["attention_mask"].clone()
    mask[1, 3] = 0
    return {"attention_mask": mask}


def _blocks(rows: dict[str, Any]) -> dict[str, Any]:
    mask = rows["attention_mask"]
    return {"attention_mask": mask[:, None, None].bool().expand(-1, 1, mask.shape[1], -1)}


def _nothing(rows: dict[str, Any]) -> dict[str, Any]:
    mask = rows["attention_mask"].clone()
    mask[2] = 0
    return {"attention_mask": mask}


OWN_WAY: dict[str, tuple[Any, str]] = {
    "holes": (_hole, "holes"),
    "blocks": (_blocks, "two dimensions"),
    "nothing": (_nothing, "nothing but padding"),
    "attentions": (lambda _: {"output_attentions": True}, "output_attentions"),
    "labels": (lambda rows: {"labels": rows["input_ids"] % 3}, "labels other than -100"),
    "half": (lambda rows: {"attention_mask": rows["attention_mask"] * 0.5}, "0 and 1"),
}


@pytest.mark.parametrize("case", OWN_WAY)
def test_the_models_own_way_is_taken_and_said_once(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = pair("bert", "tokens")
    rows = batch("bert")
    rows |= OWN_WAY[case][0](rows)
    with counting_packed() as packed, caplog.at_level("WARNING", "trainfit"):
        for _ in range(3):
            found, wanted = model(**rows), plain(**rows)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=0)
    assert packed == []
    said = [one.getMessage() for one in caplog.records if one.name == "trainfit"]
    assert [OWN_WAY[case][1] in line for line in said] == [True]


def test_caches_and_generate_go_the_models_own_way() -> None:
    plain, model = pair("llama", "causal")
    rows = batch("llama", "left")
    texts = [one.generate(**rows, max_new_tokens=5, do_sample=False) for one in (plain, model)]
    assert torch.equal(*texts)
    assert model(**rows).past_key_values is not None
    assert model(**rows, use_cache=True).past_key_values is not None
    labels = _labels(rows, "causal")
    model.train()(**rows, labels=labels).loss.backward()  # watched, with padding
    assert model(**rows, labels=labels).past_key_values is None


def test_a_first_label_after_padding_is_predicted_from_padding() -> None:
    plain, model = pair("llama", "causal")
    rows = batch("llama", "left")
    packed = check_same(plain, model, rows, labels=_labels(rows, "causal", True), use_cache=False)
    assert packed == []
    rows = batch("llama", "right")
    assert check_same(plain, model, rows, labels=_labels(rows, "causal", True), use_cache=False)


def test_a_mask_that_disagrees_with_the_padding_ids_of_a_last_token_head() -> None:
    plain, model = pair("llama")
    rows = batch("llama")
    rows["input_ids"][0, -1] = 7  # beyond the mask, but no padding id
    assert check_same(plain, model, rows) == []
    ended = batch("llama")
    ended["input_ids"][1, -1] = 0  # a real token that has the padding id
    assert check_same(plain, model, ended)


# ── lengths from the host ─────────────────────────────────────────────────────────────────────


class Sent(torch.Tensor):
    """A tensor that stands for one on a GPU, whose values may not be read."""

    is_cpu = False

    def tolist(self) -> Any:
        raise AssertionError("the GPU was waited for")


def test_lengths_come_from_the_host_where_a_loader_sent_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import data_loader

    from trainfit.integrations import host_batches

    def send(rows: Any, _device: str) -> Any:
        """Send as a BatchEncoding does, in place."""
        rows.update({name: one.clone().as_subclass(Sent) for name, one in rows.items()})
        return rows

    monkeypatch.setattr(data_loader, "send_to_device", send)
    host_batches.keep_host_batches()
    host_batches.keep_host_batches()
    here = batch("bert")
    there = data_loader.send_to_device(BatchEncoding(dict(here)), "meta")
    found = host_batches.host_copies(there, ("attention_mask", "labels"))
    assert found is not None
    assert list(found) == ["attention_mask"]
    assert found["attention_mask"] is here["attention_mask"]
    there["attention_mask"][0, 0] = 0
    assert host_batches.host_copies(there, ("attention_mask",)) is None
    assert host_batches.host_copies(here, ("attention_mask",)) is None


def test_batches_that_sentence_transformers_sends_keep_their_copies_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainfit.integrations import host_batches

    def batch_to_device(rows: Any, _device: str) -> Any:
        rows.update({name: one.clone().as_subclass(Sent) for name, one in rows.items()})
        return rows

    # A loss has imported it by its name, so that no other module is the place to replace it.
    loss = ModuleType("sentence_transformers.losses")
    loss.batch_to_device = batch_to_device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers.losses", loss)
    host_batches.keep_host_batches()
    here = batch("bert")
    rows = dict(here)
    there = loss.batch_to_device(rows, "cpu")
    assert there is rows  # in place, as theirs
    found = host_batches.host_copies(there, ("attention_mask",))
    assert found is not None
    assert found["attention_mask"] is here["attention_mask"]


def test_rows_found_on_the_host_are_those_found_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, model = pair("bert")
    inputs = batch("bert", "right")
    asked: list[Any] = []

    def copies(given: Any, names: Any) -> Any:
        asked.append({name: given[name].clone() for name in names if name in given})
        return asked[-1]

    monkeypatch.setattr("trainfit.integrations.unpadded_calls.host_copies", copies)
    assert check_same(plain, model, inputs)
    assert asked
