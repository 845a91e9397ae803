"""A transformers model as an encoder of sequences, on padded and on packed rows.

Its layers call trainfit's attention. Decoders (Gemma, Llama, Qwen, GPT-2) become bidirectional
unless they are taken as published. Their config says so too, so that plain transformers computes
the same with the saved model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Quantization
from trainfit.jobs.models import sources
from trainfit.jobs.models.building import build_anywhere, unscript
from trainfit.jobs.models.classifier_settings import Weights, WeightsDtype
from trainfit.kernels import attention, disentangled, varlen
from trainfit.kernels.attention import Layout, same_sequence
from trainfit.kernels.supported import OWN_ATTENTION, model_obstacle
from trainfit.kernels.unpadded_rows import without_padding
from trainfit.kernels.varlen import PackedRows
from trainfit.measuring.flops import sliding_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
_FEED_FORWARD_DROPOUT = (
    "hidden_dropout_prob",  # BERT: embeddings too, hence both rates of GPT-2 below
    "mlp_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "dropout",
)
_POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""Names of tables of learned positions."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Properties of a backbone that a forward pass depends on."""

    window: int | None
    """Distance from which on layers with a sliding window do not see a token."""
    first_position: int
    """Position id of a sequence's first token."""
    positions: int | None
    """Maximum length of a sequence with learned positions; None for any length."""
    token_types: bool
    """True if token_type_ids tell the two texts of a pair apart."""
    own_attention: bool
    head: int
    """Size of an attention head."""
    softcap: float | None
    """Bound that attention logits are squashed to."""
    attention_dropout: float
    causal: bool = False
    """True if a token sees none after it."""


def build_encoder(
    source: str | PretrainedConfig,
    *,
    weights: Weights = "auto",
    overrides: dict[str, Any] | None = None,
    attention_dropout: float | None = None,
    feed_forward_dropout: float | None = None,
    dtype: WeightsDtype = "float32",
    quantization: Quantization = "none",
    published: bool = False,
) -> PreTrainedModel:
    """Build a bidirectional encoder without a head or a pooler.

    `source` is a name of the catalogue or the hub, a local folder, or a transformers config.
    As `published`, a decoder stays causal and a pooler stays.
    """
    config, place = sources.find(source, weights, overrides or {}, published=published)
    text_config = config.get_text_config()
    _set_dropout(text_config, _ATTENTION_DROPOUT, attention_dropout)
    configured = _set_dropout(text_config, _FEED_FORWARD_DROPOUT, feed_forward_dropout)
    kind = getattr(torch, dtype)
    build = partial(sources.create, config, place, kind, quantization, published=published)
    model = build_anywhere(build)
    if feed_forward_dropout and not configured:
        _drop_outputs(_feed_forwards(model), feed_forward_dropout)
    _take_attention(model, published=published)
    if getattr(model, "pooler", None) is not None and not published:
        # The classifier has its own, and DDP waits for weights that get no gradients.
        model.register_module("pooler", None)
    return model


def traits_of(model: PreTrainedModel) -> Traits:
    """Look up the properties of a model."""
    first = _first_position(model)
    tables = [
        module.num_embeddings - first - getattr(module, "offset", 0)  # OPT's table has one
        for name, module in model.named_modules()
        if name.endswith(_POSITIONS) and isinstance(module, nn.Embedding)
    ]
    return Traits(
        window=sliding_window(model.config),
        first_position=first,
        positions=min(tables, default=None),
        token_types=(getattr(model.config, "type_vocab_size", None) or 0) > 1,
        own_attention=model.config.model_type in OWN_ATTENTION,
        head=_head(model.config),
        softcap=getattr(model.config, "attn_logit_softcapping", None),
        attention_dropout=max(
            getattr(model.config, name, None) or 0.0 for name in _ATTENTION_DROPOUT
        ),
        causal=any(getattr(module, "is_causal", False) for module in model.modules()),
    )


def encode(
    model: PreTrainedModel,
    traits: Traits,
    input_ids: Tensor,
    layout: Layout,
    token_type_ids: Tensor | None = None,
    *,
    path: attention.Path = "auto",
) -> Tensor:
    """Compute hidden states `[B, T, width]`; a sequence attends to itself and to no other."""
    if layout.cu_seqlens is None or layout.max_seqlen < layout.ids.shape[1]:  # else not known
        check_length(traits, layout.max_seqlen)
    drops = path == "auto" and drops_padding(model, traits)
    rows = without_padding(layout, traits.window, causal=traits.causal) if drops else None
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": layout.positions + traits.first_position,
    }
    if traits.token_types and token_type_ids is not None:
        inputs["token_type_ids"] = token_type_ids
    if rows is not None:
        real, attended = rows
        inputs = {name: real.pack(values) for name, values in inputs.items()}
        output = model(**inputs, **{attention.ARGUMENT: attended})
        return real.restore(output.last_hidden_state)
    if not traits.own_attention:
        inputs[attention.ARGUMENT] = attention.choose(
            layout,
            traits.window,
            path=path,
            dtype=model.dtype,
            head=traits.head,
            softcap=traits.softcap,
            dropout=traits.attention_dropout if model.training else 0.0,
            causal=traits.causal,
        )
        output = model(**inputs)
    elif layout.cu_seqlens is None:
        mask = None if layout.mask is None else layout.mask.long()
        output = model(**inputs, attention_mask=mask)
    else:
        output = _encode_own(model, inputs, layout, path)
    hidden: Tensor = output.last_hidden_state
    return hidden


def drops_padding(model: PreTrainedModel, traits: Traits) -> bool:
    """Tell if padded rows lose their padding outside of attention: on a CPU, where it costs most.

    Compiled blocks keep it, since their shapes must not change.
    """
    if traits.own_attention or model.device.type != "cpu":
        return False
    return all(module._compiled_call_impl is None for module in model.modules())


def _encode_own(
    model: PreTrainedModel, inputs: dict[str, Any], layout: Layout, path: attention.Path
) -> Any:
    """Run DeBERTa on a packed row, through its parts: its forward takes no mask of blocks.

    Distances within a sequence are the same in a packed row. MPNet's forward takes such a mask.
    """
    demanded = path in ("varlen", "varlen_efficient")
    reason = own_obstacle(model, layout, demanded=demanded)
    if demanded and reason is not None:
        raise BadInput(
            f"no packed attention for {model.config.model_type} here: {reason}",
            "set attention to auto",
        )
    if model.config.model_type == "mpnet":
        hidden = ~same_sequence(layout)[:, None]
        lowest = torch.finfo(model.dtype).min
        return model(**inputs, attention_mask=hidden.to(model.dtype) * lowest)
    embedded = model.get_submodule("embeddings")(**inputs)
    encoder = model.get_submodule("encoder")
    if path == "masked" or reason is not None:
        return encoder(embedded, same_sequence(layout).long(), output_hidden_states=False)
    return encoder(
        embedded,
        torch.ones_like(layout.ids)[:, None],  # three dimensions, else it is expanded to T×T
        output_hidden_states=False,
        relative_pos=disentangled.packed_attention(
            layout, model.config, attention.computed_in(layout.ids.device.type, model.dtype)
        ),
    )


PackedPath = Literal["varlen", "varlen_efficient", "softcapped", "disentangled"]
"""Kernel that attends within packed rows."""


def packed_path(
    model: PreTrainedModel,
    traits: Traits,
    dtype: torch.dtype | None = None,
    longest: int | None = None,
) -> tuple[PackedPath | None, str]:
    """Name the kernel for packed rows on the model's device; else None and the reason.

    `dtype` is that of matrix products, by default the current one. Sequences are no longer than
    `longest`.
    """
    device = model.device
    if traits.own_attention:
        reason = own_obstacle(model, None)
        return ("disentangled" if reason is None else None), reason or ""
    if device.type != "cuda":
        return None, f"the rows are on the device {device.type}"
    if missing := attention.missing(traits.softcap):
        return None, missing
    return varlen.kernel_for(
        PackedRows(
            capability=varlen.capability(device.index),
            dtype=dtype or attention.computed_in(device.type, model.dtype),
            head=traits.head,
            softcap=traits.softcap,
            dropout=traits.attention_dropout if model.training else 0.0,
            causal=traits.causal,
            window=traits.window,
            longest=longest,
            flash=varlen.flash_exists(),
        )
    )


def own_obstacle(
    model: PreTrainedModel, layout: Layout | None, *, demanded: bool = False
) -> str | None:
    """Reason why a model with its own attention cannot take packed rows here; None if it can."""
    device = model.device if layout is None else layout.ids.device
    on_gpu = device.type == "cuda"
    if not on_gpu and not (demanded and varlen.stands_in(device.type)):
        return f"the rows are on the device {device.type}"
    if on_gpu and not varlen.triton_exists():
        return "Triton is not installed"
    return disentangled.obstacle(
        model.config,
        capability=varlen.capability(device.index) if on_gpu else None,
        longest=None if layout is None else layout.max_seqlen,
    )


def _take_attention(model: PreTrainedModel, *, published: bool) -> None:
    """Give the layers trainfit's attention; raise BadInput for a model that cannot take it."""
    config = model.config
    if config.model_type in OWN_ATTENTION:
        unscript(model)
        if model_obstacle(config.to_dict()) is None:
            from trainfit.kernels.disentangled_layers import take_packed_rows

            take_packed_rows(model)
        return
    if (reason := _obstacle(model)) is not None:
        raise BadInput(
            f"{config.model_type} cannot be made a bidirectional encoder: {reason}",
            "choose a model of the BERT, ModernBERT, DeBERTa, Gemma, Llama or Qwen families",
        )
    model.set_attn_implementation(attention.register())
    causal = published and getattr(config, "is_causal", True)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if getattr(module, "is_causal", False) and not causal:
            module.is_causal = False


def _obstacle(model: PreTrainedModel) -> str | None:
    """Reason why trainfit's attention is not all that a model's tokens would see; None: it is."""
    config = model.config
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"it has {', '.join(sorted(others))} layers"
    positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if not positions or not model._supports_attention_backend:
        return "its attention is fixed"
    if any(isinstance(one, nn.Conv1d) and one.kernel_size != (1,) for one in model.modules()):
        return "it has a convolution, which reaches over the ends of packed sequences"
    if getattr(config, "trigram_input", False):  # MobileBERT
        return "its embeddings reach over the ends of packed sequences"
    return None


def _head(config: PretrainedConfig) -> int:
    size: int | None = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if size is None else size


def check_length(traits: Traits, longest: int) -> None:
    """Raise BadInput for a position beyond the table: on a GPU it would break the process."""
    if traits.positions is not None and longest > traits.positions:
        raise BadInput(
            f"sequences of up to {longest} tokens, but the model has {traits.positions} positions",
            f"set data.max_length to {traits.positions} or less",
        )


def _first_position(model: PreTrainedModel) -> int:
    """Position id of the first token; RoBERTa and its kin count from the padding id on."""
    maker = "create_position_ids_from_input_ids"
    embeddings = getattr(model, "embeddings", None)
    if hasattr(embeddings, maker) or hasattr(sys.modules[type(model).__module__], maker):
        # MPNet's is 1, whatever its configuration says.
        first: int = getattr(embeddings, "padding_idx", model.config.pad_token_id) + 1
        return first
    return 0


def _set_dropout(config: PretrainedConfig, names: Iterable[str], value: float | None) -> bool:
    """Set the fields of these names unless `value` is None; return True if there are any."""
    found = [name for name in names if hasattr(config, name)]
    for name in found:
        setattr(config, name, getattr(config, name) if value is None else value)
    return bool(found)


def _feed_forwards(model: PreTrainedModel) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not found:
        raise BadInput(
            f"{model.config.model_type} has no feed-forward dropout",
            "leave feed_forward_dropout out",
        )
    return found


def _drop_outputs(modules: Iterable[nn.Module], probability: float) -> None:
    """Add dropout to the outputs of modules by hooks, which leave the weights' names unchanged."""

    def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    for module in modules:
        module.register_forward_hook(drop)
