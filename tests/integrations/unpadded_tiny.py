"""Tiny models of every family that goes without padding, and padded batches for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from own_tiny import COMMON, FAMILIES, GROUPED, config_of
from torch import Tensor, nn
from transformers import PretrainedConfig

from trainfit.integrations import speeding, unpadded_forward

_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_PAIRED = COMMON | {"num_key_value_heads": 4}
_OPT = {key: value for key, value in COMMON.items() if key != "initializer_range"}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta": (
        "DebertaConfig",
        COMMON | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "mpnet": ("MPNetConfig", COMMON | {"pad_token_id": 1}),
    "camembert": ("CamembertConfig", COMMON | {"pad_token_id": 1}),
    "gemma": ("GemmaConfig", GROUPED),
    "phi": ("PhiConfig", _PAIRED | {"rope_parameters": _ROTARY}),
    "phi3": ("Phi3Config", _PAIRED | {"sliding_window": 3}),
    "olmo2": ("Olmo2Config", GROUPED),
    "smollm3": ("SmolLM3Config", GROUPED | {"num_hidden_layers": 4}),
    "gpt-neox": ("GPTNeoXConfig", COMMON | {"rope_parameters": _ROTARY}),
    "opt": ("OPTConfig", _OPT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
}
NAMES = (*FAMILIES, *_MORE)
HEADS = {
    "classes": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "masked": transformers.AutoModelForMaskedLM,
    "causal": transformers.AutoModelForCausalLM,
    "body": transformers.AutoModel,
}
SIDES = ("right", "left", "both", "none")


def config(name: str, dropout: float = 0.0, **others: Any) -> PretrainedConfig:
    """A config of a family with one rate of dropout everywhere."""
    if name in FAMILIES:
        made = config_of(name, **{"num_labels": 3} | others)
    else:
        kind, fields = _MORE[name]
        made = getattr(transformers, kind)(**fields | {"num_labels": 3} | others)
    for field in vars(made):
        if "dropout" in field or field.endswith("pdrop"):
            setattr(made, field, dropout)
    return made


def pair(name: str, head: str = "classes", **others: Any) -> tuple[Any, Any]:
    """Two models with the same weights: the plain one, and one that goes without padding."""
    torch.manual_seed(0)
    plain = HEADS[head].from_config(config(name, **others)).eval()
    return plain, speeding.unpadded(copy.deepcopy(plain))


def batch(
    name: str, side: str = "right", lengths: tuple[int, ...] = (5, 11, 1, 8), seed: int = 1
) -> dict[str, Tensor]:
    """A batch with padding on a side, with the padding id that the family has."""
    pad = config(name).pad_token_id
    draw = torch.Generator().manual_seed(seed)
    width = max(lengths) + (2 if side == "both" else 0)
    ids = torch.randint(3, 90, (len(lengths), width), generator=draw)
    starts = {"right": lambda _: 0, "left": lambda n: width - n, "both": lambda n: (width - n) // 2}
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths if side != "none" else ()):
        mask[row] = 0
        first = starts[side](length)
        mask[row, first : first + length] = 1
    return {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask}


@contextmanager
def counting_packed() -> Iterator[list[int]]:
    """Count the tokens of the packed rows that models run on."""
    counted: list[int] = []
    run = unpadded_forward._run_packed

    def counting(*given: Any) -> Any:
        counted.append(given[3].tokens)
        return run(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpadded_forward, "_run_packed", counting)
        yield counted


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = ((n.removeprefix("_orig_mod."), p.grad) for n, p in model.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def check_same(plain: Any, model: Any, inputs: dict[str, Any], **call: Any) -> list[int]:
    """Compare outputs at real tokens, the loss and all gradients; return the packed tokens."""
    plain.zero_grad()
    model.zero_grad()
    wanted = plain(**inputs, **call)
    with counting_packed() as packed:
        found = model(**inputs, **call)
    assert type(found) is type(wanted)
    assert found.keys() - {"past_key_values"} == wanted.keys() - {"past_key_values"}
    real = inputs["attention_mask"].bool() if inputs.get("attention_mask") is not None else None
    total = [torch.zeros(()), torch.zeros(())]
    for name in found.keys() - {"past_key_values"}:
        for one, other in zip(_tensors(found[name]), _tensors(wanted[name]), strict=True):
            per_token = real is not None and one.dim() == 3 and one.shape[:2] == real.shape
            if per_token:
                assert not packed or not one[~real].any(), name
                one, other = one[real], other[real]
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            signs = torch.arange(one.numel()).sin().reshape(one.shape)
            total = [total[0] + (one * signs).sum(), total[1] + (other * signs).sum()]
    if not wanted[next(iter(wanted))].requires_grad:
        return packed
    total[0].backward()
    total[1].backward()
    expected, got = gradients(plain), gradients(model)
    assert got.keys() == expected.keys()
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for part, gradient in got.items():
        assert (gradient - expected[part]).norm() <= 1e-5 * size, part
    return packed


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]
