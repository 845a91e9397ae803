"""Small models with heads that a GPU's kernels take, and packed rows of random sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainfit.jobs.models.classifier import EncoderClassifier, build_classifier
from trainfit.jobs.models.classifier_settings import ClassifierSettings

VOCABULARY = 90
FILLER = 89
"""A token that stands nowhere else."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
_IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0) | dict.fromkeys(
    ("eos_token_id", "sep_token_id"), 1
)
_GEMMA = {"num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
TINY: dict[str, dict[str, Any]] = {
    "bert-base": _COMMON | {"max_position_embeddings": 512},
    "modernbert-base": _COMMON | _IDS | _KINDS | {"local_attention": 32},
    "gemma-3-1b-it": _COMMON | _GEMMA | _KINDS | {"sliding_window": 32},
}


def tiny(name: str, *, softcap: float | None = None, **settings: Any) -> EncoderClassifier:
    """A classifier without dropout."""
    torch.manual_seed(0)
    none = dict.fromkeys(("attention_dropout", "feed_forward_dropout", "head_dropout"), 0.0)
    overrides = TINY[name] | ({} if softcap is None else {"attn_logit_softcapping": softcap})
    chosen = none | {"name": name, "classes": 3, "overrides": overrides} | settings
    model = build_classifier(ClassifierSettings(**chosen))
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


def packed(lengths: tuple[int, ...], filler: int = 0, device: str = "cpu") -> dict[str, Any]:
    """A packed row and the length of its longest sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, FILLER, (sum(lengths),), generator=generator)
    row = torch.cat([tokens, torch.full((filler,), FILLER)])[None]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "input_ids": row.to(device),
        "cu_seqlens": starts.to(device),
        "max_seqlen": max(lengths),
    }


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """The sequences of a packed row in rows of their own."""
    starts = batch["cu_seqlens"].tolist()
    pieces = [batch["input_ids"][0, a:b] for a, b in pairwise(starts)]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(piece) for piece in pieces], batch_first=True)
    return {"input_ids": pad(pieces, batch_first=True), "attention_mask": mask}


def logits_and_gradients(
    model: EncoderClassifier, batch: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**batch).float()
    labels = torch.arange(len(logits), device=logits.device) % 3
    functional.cross_entropy(logits, labels, reduction="sum").backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def taken_shares(attend: Callable[[Tensor], Tensor], value: Tensor, starts: Tensor) -> Tensor:
    """Shares that queries take of the keys of their sequence, `[heads, tokens, longest]`.

    Values that are rows of the identity show them, a few keys at a time.
    """
    lengths = starts.diff()
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=value.device), lengths)
    place = torch.arange(len(value), device=value.device) - starts[ids]
    head, found = value.shape[-1], []
    for begin in range(0, int(lengths.max()), head):
        picked = torch.zeros_like(value)
        here = ((place >= begin) & (place < begin + head)).nonzero()[:, 0]
        picked[here, :, place[here] - begin] = 1
        found.append(attend(picked).permute(1, 0, 2))
    return torch.cat(found, -1).float()


def check_kept(shares: Tensor, dropped: Tensor, probability: float, precision: float) -> Tensor:
    """Factors by which dropout multiplied the shares: 0, or what keeps their sum."""
    kept = (dropped > 0).float() / (1 - probability)
    error = torch.linalg.norm(dropped - shares * kept) / torch.linalg.norm(shares)
    assert error < precision
    seen = shares > 1e-4  # beyond a window, or rounded away, nothing can be told
    rate = 1 - (dropped[seen] > 0).float().mean().item()
    # The flash kernel draws bytes; the rest is five deviations of so many draws.
    assert abs(rate - probability) < 1 / 256 + 5 * (0.25 / int(seen.sum())) ** 0.5
    return kept


def relative_error(found: Tensor, sure: Tensor) -> float:
    found, sure = found.double(), sure.double()
    return (torch.linalg.norm(found - sure) / torch.linalg.norm(sure)).item()


def in_the_interpreter(script: str) -> None:
    """Run what checks Triton kernels in Python, in a process where nobody has imported it yet."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("Triton's interpreter and this NumPy do not go together")
    assert done.returncode == 0, done.stderr
