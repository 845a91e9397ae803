"""How a model is built: where, or as fakes; its trained parts, adapters and transformers' head."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from trainfit.core.errors import BadInput, refusing
from trainfit.core.libraries import import_peft, need
from trainfit.core.plan_records import Plan
from trainfit.data.model_files import read_named
from trainfit.jobs.models import sources
from trainfit.jobs.models.classifier_settings import Checkpointing, ClassifierSettings
from trainfit.kernels.quantized import QuantizedLinear
from trainfit.planning.estimator.step_work import make_fake

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Place = str | torch.device
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def birthplace(plan: Plan, device: Place) -> Place:
    """Return the device to build on: the CPU for a model that is too large for one GPU."""
    return "cpu" if plan.sharding != "none" else device


def on_device(device: Place, build: Callable[[], ModuleT]) -> Callable[[], ModuleT]:
    """Return `build` on a device; to draw a billion random weights on a CPU takes half a minute."""

    def built() -> ModuleT:
        with torch.device(device):
            return build()

    return built


def build_anywhere(build: Callable[[], ModuleT]) -> ModuleT:
    """Call `build`; under fake tensors, build on the meta device and make the result fake."""
    mode = detect_fake_mode()
    if mode is None:
        return build()
    with unset_fake_temporarily(), torch.device("meta"):
        model = build()
    make_fake(model, mode)
    return model


def unscript(model: nn.Module) -> None:
    """Replace TorchScript functions in the module of `model` by the Python they were made from.

    The results are the same; TorchScript cannot run on fake tensors.
    """
    module = sys.modules[type(model).__module__]
    for name, function in list(vars(module).items()):
        if isinstance(function, torch.jit.ScriptFunction):
            setattr(module, name, getattr(function, "_torchdynamo_inline", function))


# ── trained parts ─────────────────────────────────────────────────────────────────────────────────


_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Gemma, Llama, Qwen, Mistral
    ("query", "key", "value", "attention.output.dense"),  # BERT, RoBERTa, ELECTRA
    ("query_proj", "key_proj", "value_proj", "attention.output.dense"),  # DeBERTa-v2, v3
    ("Wqkv", "attn.Wo"),  # ModernBERT
    ("attn.c_attn", "attn.c_proj"),  # GPT-2
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("query", "key", "value", "attention.dense"),  # ALBERT
    ("in_proj", "attention.output.dense"),  # DeBERTa of version 1
    ("attn.q", "attn.k", "attn.v", "attn.o"),  # MPNet
    ("q_proj", "k_proj", "v_proj", "self_attn.dense"),  # Phi
    ("qkv_proj", "o_proj"),  # Phi-3
    ("query_key_value", "attention.dense"),  # Pythia
    ("q_proj", "k_proj", "v_proj", "self_attn.out_proj"),  # OPT
)
"""Names of the query, key, value and output projections of attention in each family."""


def train_by(model: PreTrainedModel, settings: ClassifierSettings) -> None:
    """Make all weights trainable, none, or adapters alone, as the method asks."""
    if settings.method == "frozen":
        model.requires_grad_(False)
    elif settings.method in ("lora", "dora"):
        add_adapters(model, settings)


def add_adapters(model: PreTrainedModel, settings: ClassifierSettings) -> None:
    """Add LoRA or DoRA to the attention projections; everything else is frozen."""
    need(f"model.method={settings.method}", "peft")
    import_peft()
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    names = projections(model)
    layers = [model.get_submodule(name) for name in names]
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # any number scales
            lora_dropout=settings.lora_dropout,
            target_modules=names,
            use_dora=settings.method == "dora",
            fan_in_fan_out=isinstance(layers[0], Conv1D),
        )
    )
    dora = compilable_dora()
    for module in model.modules():
        if type(module) is dora.__base__:
            module.__class__ = dora
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Small updates vanish in bf16 weights, and adapters in float32 take little memory.
            parameter.data = parameter.data.float()


@cache
def compilable_dora() -> type[nn.Module]:
    """Return peft's layer of DoRA with `_dora_addition`; peft takes a second to import."""
    from peft.tuners.lora.dora import DoraLinearLayer

    return type("CompilableDora", (DoraLinearLayer,), {"forward": _dora_addition})


def _dora_addition(
    layer: Any,
    x: Tensor,
    *,
    lora_A: nn.Linear,
    lora_B: nn.Linear,
    scaling: float,
    base_layer: nn.Module,
    base_result: Tensor | None = None,
    **_rest: Any,
) -> Tensor:
    """Compute DoRA's addition to its layer's output, in operations that torch.compile can trace.

    `base_result` is that output, None if `x` had dropout. The norm is a constant in the backward
    pass (section 4.3 of the paper).
    """
    weight: Any = base_layer.weight
    weight = (weight.T if layer.fan_in_fan_out else weight).to(x.dtype)
    with torch.no_grad():
        product = (lora_B.weight @ lora_A.weight).to(x.dtype)
        norm = torch.linalg.norm(weight + scaling * product, dim=1)
    scale = (layer.weight / norm).view(1, -1)
    bias: Any = getattr(base_layer, "bias", None)
    if base_result is None:
        base_result = (
            base_layer.without_bias(x)  # `weight` would be kept for the backward pass
            if isinstance(base_layer, QuantizedLinear)
            else functional.linear(x, weight)
        )
    elif bias is not None:
        base_result = base_result - bias
    adapted: Tensor = lora_B(lora_A(x))
    added: Tensor = (scale - 1) * base_result + scale * adapted * scaling
    return added


def projections(model: nn.Module) -> list[str]:
    """Find the full names of the attention projections in a model."""
    names = [name for name, _ in model.named_modules()]
    for family in _PROJECTIONS:
        found = [name for name in names if name.endswith(tuple(f".{part}" for part in family))]
        if all(any(name.endswith(f".{part}") for name in found) for part in family):
            return found
    raise BadInput(
        f"no attention projections found in {type(model).__name__}",
        "train it with method=full or frozen",
    )


def checkpoint_blocks(model: PreTrainedModel, how: Checkpointing) -> None:
    """Recompute all blocks, or every second one, in the backward pass."""
    if how == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise BadInput(
            f"transformers cannot compute the blocks of {model.config.model_type} again",
            "set model.use_gradient_checkpointing=false",
        )
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = [block for block in model.modules() if isinstance(block, GradientCheckpointingLayer)]
    for block in blocks[1::2] if how == "selective" else ():
        block.gradient_checkpointing = False  # older transformers lack every_n_layers
    # Only re-entrant checkpointing needs it; it would run the backward pass of frozen parts.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]


# ── transformers' own head ────────────────────────────────────────────────────────────────────────
# `AutoModelForSequenceClassification`, or `AutoModelForTokenClassification`, is built without its
# encoder. In the encoder's place stands a module that hands on the hidden states that the head
# reads, one per sequence or all, so that the class's own code computes the logits, whatever its
# family, and the weights keep their names.


Reads = Literal["first", "last", "mean", "none"]
"""Tokens that a head reads: the first, the last, the mean of all, or each by itself (none)."""


class OwnHead(nn.Module):
    """A sequence- or token-classification class of transformers, without its encoder."""

    def __init__(self, model: PreTrainedModel, reads: Reads) -> None:
        super().__init__()
        self.model = model
        self.reads = reads

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits from the hidden states that the head reads.

        They are `[sequences, width]`, or `[B, T, width]` where it reads each token by itself.
        """
        hidden = pooled if self.reads == "none" else pooled[:, None]
        # The token is no padding, or all are: a head that looks for the last finds the only one.
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=pooled.device)
        logits: Tensor = self.model(input_ids=ids, inputs_embeds=hidden).logits
        return logits

    @property
    def prefix(self) -> str:
        """Name of the encoder in the class."""
        return self.model.base_model_prefix

    def names(self, encoder: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the weights of the whole classifier with this encoder."""
        inside = {f"{self.prefix}.{name}": one for name, one in encoder.state_dict().items()}
        both = inside | self.model.state_dict()
        return {name: tuple(tensor.shape) for name, tensor in both.items()}

    def drop(self, probability: float) -> bool:
        """Set the dropout of the head; return False if it has none."""
        layers = [one for one in self.model.modules() if isinstance(one, nn.Dropout)]
        for layer in layers:
            layer.p = probability
        return bool(layers)


class _Given(nn.Module):
    """Stands for the encoder: returns the hidden states that it is given, and the pooler's."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)
        self.activation = getattr(encoder, "pooler_activation", None)  # ALBERT's pooler is a matrix

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        pooled = None
        if self.pooler is not None and self.activation is not None:
            pooled = self.activation(self.pooler(inputs_embeds[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(inputs_embeds)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=inputs_embeds,  # type: ignore[arg-type]
            pooler_output=pooled,
        )


def find_head(source: str | PretrainedConfig, settings: ClassifierSettings) -> OwnHead | None:
    """Build the model's own head on the meta device; None where transformers has none to take."""
    config, _ = sources.find(source, settings.weights, settings.overrides, published=True)
    text = config.get_text_config()
    with refusing(partial(sources.unbuildable, text.model_type)):
        shell = _without_encoder(text, settings)
        reads = None if shell is None else _reads(shell)
    return None if shell is None or reads is None else OwnHead(shell, reads)


def fill_head(
    head: OwnHead,
    encoder: PreTrainedModel,
    source: str | PretrainedConfig,
    settings: ClassifierSettings,
) -> None:
    """Give a head its weights: those beside the encoder's, and random ones for all others.

    The encoder's pooler becomes the head's, since it is trained where the encoder is not.
    """
    model: Any = head.model
    model.to_empty(device=encoder.device)
    for module in model.modules():
        model._init_weights(module)
    given = getattr(model, head.prefix)
    if getattr(encoder, "pooler", None) is not None:  # NomicBERT's encoder by itself has none
        if given.pooler is not None:
            given.pooler = encoder.pooler
        encoder.register_module("pooler", None)
    _, place = sources.find(source, settings.weights, settings.overrides, published=True)
    if place is not None:
        _load(model, read_named(place, set(model.state_dict())))
    head.float()


def _without_encoder(
    config: PretrainedConfig, settings: ClassifierSettings
) -> PreTrainedModel | None:
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if settings.words:
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(config) not in known:
        return None
    kind: Any = known[type(config)]
    config = copy.deepcopy(config)
    config.num_labels = settings.classes
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # else last-token heads take one sequence at a time
    with torch.device("meta"):
        model: PreTrainedModel = kind(config)
    encoder = getattr(model, model.base_model_prefix, None)
    if encoder is None or encoder is model:
        return None
    setattr(model, model.base_model_prefix, _Given(encoder))
    return model


@torch.no_grad()
def _reads(shell: PreTrainedModel) -> Reads | None:
    """Find out by trial which tokens a head reads; None for none of the known ways."""
    with torch.device("cpu"):
        model: Any = copy.deepcopy(shell)
        model.to_empty(device="cpu").eval()
        for weight in (*model.parameters(), *model.buffers()):
            weight.copy_(torch.arange(weight.numel()).sin().reshape(weight.shape))
        width = shell.config.hidden_size
        hidden = torch.arange(3 * width).cos().reshape(1, 3, width)
        ids = torch.full((1, 3), (shell.config.pad_token_id or 0) + 1)
        ways: dict[Reads, Tensor] = {
            "first": hidden[:, :1],
            "last": hidden[:, -1:],
            "mean": hidden.mean(1, keepdim=True),
            "none": hidden.transpose(0, 1),
        }
        try:
            wanted = model(input_ids=ids, inputs_embeds=hidden).logits
            for way, state in ways.items():
                found = model(
                    input_ids=ids[:, :1].expand(len(state), 1), inputs_embeds=state
                ).logits
                if found.numel() == wanted.numel() and torch.allclose(
                    found.reshape(wanted.shape), wanted, rtol=1e-3, atol=1e-4
                ):
                    return way
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            return None  # it needs more than hidden states
    return None


@torch.no_grad()
def _load(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Take the weights whose shapes fit, as a head of as many classes."""
    own = model.state_dict()
    for name, weight in weights.items():
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
