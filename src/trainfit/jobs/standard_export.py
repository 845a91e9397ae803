"""Exports in transformers' own layout: classifiers with its heads, and GPT-2.

AutoModelForSequenceClassification loads a classifier of texts, AutoModelForTokenClassification one
of words.

export/config.json, model.safetensors    the whole classifier, adapters merged into its weights
export/adapter/                          LoRA or DoRA with the head: peft loads it on the base
export/tokenizer…                        AutoTokenizer.from_pretrained(export) loads it
export/trainfit.json                     classes, max_length and other facts that predict needs
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
import torch
from torch import Tensor

from trainfit.core.errors import BadInput
from trainfit.core.files import write_whole
from trainfit.hardware.model_shapes import model_shape
from trainfit.jobs.models.gpt_model import Gpt, GptShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

    from trainfit.jobs.models.building import OwnHead
    from trainfit.jobs.models.classifier import EncoderClassifier


FACTS = "trainfit.json"
FORMAT = "trainfit classifier 2"


def write_standard(
    folder: Path, model: EncoderClassifier, state: Mapping[str, Tensor], facts: dict[str, Any]
) -> None:
    """Write a classifier with its own head, with the weights in `state`, into a new folder."""
    head = cast("OwnHead", model.head)
    inside = part_of(state, "encoder.")
    of_head = {name: tensor.float() for name, tensor in part_of(state, "head.model.").items()}
    if model.settings.method in ("lora", "dora"):
        _write_adapter(folder / "adapter", model, inside, of_head)
        inside = _merged(model, inside)
    whole = {f"{head.prefix}.{name}": tensor for name, tensor in inside.items()} | of_head
    _write_config(folder, model, facts)
    safetensors.torch.save_file(
        plain_tensors(whole), folder / "model.safetensors", {"format": "pt"}
    )
    write_whole(folder / FACTS, json.dumps({"format": FORMAT, **facts}, indent=2) + "\n")


def config_of(model: EncoderClassifier, facts: dict[str, Any]) -> PretrainedConfig:
    """Return the config of the classifier, with the names of its classes."""
    head = cast("OwnHead", model.head)
    config: Any = copy.deepcopy(model.encoder.config)
    config.id2label = dict(enumerate(map(str, facts["classes"])))
    config.label2id = {name: number for number, name in config.id2label.items()}
    if not model.settings.words:
        config.problem_type = facts.get("problem_type", "single_label_classification")
    config.architectures = [type(head.model).__name__]
    config.dtype = torch.float32  # weights in half precision are made so where they are loaded
    if head.reads == "last":  # it looks for the last token that is no padding
        config.pad_token_id = facts["pad_id"]
    made: PretrainedConfig = config
    return made


def _write_config(folder: Path, model: EncoderClassifier, facts: dict[str, Any]) -> None:
    config = config_of(model, facts)
    config.save_pretrained(folder)
    keep_soft_cap(folder, config)


def keep_soft_cap(folder: Path, config: PretrainedConfig) -> None:
    """Have config.json ask for the attention that caps the logits, where the model does.

    transformers' default leaves the cap out.
    """
    if getattr(config, "attn_logit_softcapping", None) is None:
        return
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) | {"attn_implementation": "eager"}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def hub_name(name: str) -> str | None:
    """Return the name on the hub of a model; None for a folder, which others do not have."""
    if Path(name).is_dir():
        return None
    try:
        return model_shape(name).hub
    except BadInput:
        return name


def part_of(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as safetensors takes them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _merged(model: EncoderClassifier, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the encoder's weights with the adapters added to them, in float32."""
    from transformers.pytorch_utils import Conv1D

    settings = model.settings
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        layer, is_base, kind = name.rpartition(".base_layer.")
        made[f"{layer}.{kind}" if is_base else name] = tensor
        if not is_base or kind != "weight":
            continue
        inputs, outputs = (state[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
        turned = isinstance(model.encoder.get_submodule(f"{layer}.base_layer"), Conv1D)
        weight = tensor.float().T if turned else tensor.float()
        weight = weight + outputs @ inputs * (settings.lora_alpha / settings.lora_rank)
        if settings.method == "dora":
            length = state[f"{layer}.lora_magnitude_vector.default.weight"].float()
            weight = weight * (length / weight.norm(dim=1))[:, None]
        made[f"{layer}.weight"] = weight.T if turned else weight
    return made


def _write_adapter(
    folder: Path, model: EncoderClassifier, state: dict[str, Tensor], of_head: dict[str, Tensor]
) -> None:
    """Write the adapters as peft does for the whole classifier, whose head is saved with them."""
    head = cast("OwnHead", model.head)
    save_adapter(folder, model.encoder, state, prefix=f"{head.prefix}.", beside=of_head)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields |= {
        "task_type": "TOKEN_CLS" if model.settings.words else "SEQ_CLS",
        "base_model_name_or_path": hub_name(model.settings.name),
        "target_modules": sorted(fields["target_modules"]),  # peft compares the ends of names
        "modules_to_save": sorted({_module(name, head.prefix) for name in of_head}),
    }
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def save_adapter(
    folder: Path,
    encoder: PreTrainedModel,
    state: Mapping[str, Tensor],
    *,
    prefix: str = "",
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Write adapters, and weights `beside` them, in peft's layout.

    transformers' own way of it asks the hub about the model that they are for.
    """
    from peft import get_peft_model_state_dict

    found: Mapping[str, Tensor] = get_peft_model_state_dict(
        encoder, state_dict=dict(state), adapter_name="default", save_embedding_layers=False
    )
    named = {f"{prefix}{name}": tensor for name, tensor in found.items()} | dict(beside or {})
    whole = {f"base_model.model.{name}": tensor for name, tensor in named.items()}
    folder.mkdir()
    safetensors.torch.save_file(
        plain_tensors(whole), folder / "adapter_model.safetensors", {"format": "pt"}
    )
    encoder.peft_config["default"].save_pretrained(folder)


def _module(name: str, prefix: str) -> str:
    """Return the part of the head that a weight is in: the encoder's pooler, or another layer."""
    parts = name.split(".")
    return parts[1] if parts[0] == prefix else parts[0]


# ── GPT-2, which computes the same as trainfit's GPT with zero biases ───────────────────────────

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
    from transformers.initialization import no_init_weights

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
    with no_init_weights():
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
