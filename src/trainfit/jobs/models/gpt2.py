"""Conversion to and from transformers' GPT-2, which computes the same with zero biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainfit.core.errors import BadInput
from trainfit.jobs.models.gpt_model import Gpt, GptShape

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel

_OUTSIDE = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "ln_1.weight",
    "attention.qkv.weight": "attn.c_attn.weight",
    "attention.output.weight": "attn.c_proj.weight",
    "feed_forward_norm.weight": "ln_2.weight",
    "feed_forward.up.weight": "mlp.c_fc.weight",
    "feed_forward.down.weight": "mlp.c_proj.weight",
}
_NORMS_EPSILON = 1e-5


def to_gpt2(model: Gpt) -> GPT2LMHeadModel:
    """Convert a model to transformers' GPT-2, on the CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, weights = model.shape, model.state_dict()
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        activation_function="gelu",
        layer_norm_epsilon=_NORMS_EPSILON,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    other: GPT2LMHeadModel = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    other.to(dtype=model.token_embedding.weight.dtype)  # type: ignore[call-arg]
    state = {name: torch.zeros_like(value) for name, value in other.state_dict().items()}
    for ours, theirs in _names(shape.n_layer).items():
        state[theirs] = _transposed(ours, weights[ours])
    state["lm_head.weight"] = state["transformer.wte.weight"]
    other.load_state_dict(state)
    return other


def from_gpt2(other: GPT2LMHeadModel) -> Gpt:
    """Convert transformers' GPT-2; raise BadInput if the result would compute something else."""
    config, weights = other.config, other.state_dict()
    problems = _differences(config, weights)
    if problems:
        raise BadInput(
            f"this GPT-2 has {', '.join(problems)}, which trainfit's GPT has not",
            "train it from random weights, or use it through transformers",
        )
    model = Gpt(
        GptShape(
            vocab_size=config.vocab_size,
            block_size=config.n_positions,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            dropout=float(config.resid_pdrop),
        )
    ).to(other.dtype)
    names = _names(config.n_layer)
    model.load_state_dict(
        {ours: _transposed(ours, weights[theirs]) for ours, theirs in names.items()}
    )
    return model


def _names(layers: int) -> dict[str, str]:
    """Map trainfit's name of each weight to that of transformers."""
    blocks = {
        f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{theirs}"
        for layer in range(layers)
        for ours, theirs in _IN_BLOCK.items()
    }
    return _OUTSIDE | blocks


def _transposed(ours: str, weight: Tensor) -> Tensor:
    """Transpose the matrices of a block, as GPT-2 stores them."""
    return weight.t() if ours.startswith("blocks.") and weight.dim() == 2 else weight


def _differences(config: GPT2Config, weights: dict[str, Tensor]) -> list[str]:
    """List the features of this GPT-2 that trainfit's GPT lacks."""
    biases = any(bool(value.any()) for name, value in weights.items() if name.endswith(".bias"))
    checks = {
        "biases": biases,
        f"activation {config.activation_function}": config.activation_function != "gelu",
        f"norm epsilon {config.layer_norm_epsilon}": config.layer_norm_epsilon != _NORMS_EPSILON,
        f"inner width {config.n_inner}": config.n_inner not in (None, 4 * config.n_embd),
        "untied output weights": not config.tie_word_embeddings,
        "unscaled attention": not config.scale_attn_weights,
        "attention scaled by layer": config.scale_attn_by_inverse_layer_idx,
    }
    return [difference for difference, there in checks.items() if there]
