"""How a model is built: on a device, on the CPU or as fakes; its trained parts and adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainfit.core.errors import BadInput
from trainfit.core.libraries import import_peft, need
from trainfit.core.plan_records import Plan
from trainfit.jobs.models.classifier_settings import Checkpointing, ClassifierSettings
from trainfit.planning.estimator.step_work import make_fake

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    """Make trainable what the method trains: everything, nothing, or adapters."""
    if settings.method == "frozen":
        model.requires_grad_(False)
    elif settings.method in ("lora", "dora"):
        add_adapters(model, settings)


def add_adapters(model: PreTrainedModel, settings: ClassifierSettings) -> None:
    """Add LoRA or DoRA to the attention projections; everything else is frozen."""
    need(f"model.method={settings.method}", "peft")
    import_peft()
    from peft import LoraConfig
    from peft.tuners.lora.dora import DoraLinearLayer
    from transformers.pytorch_utils import Conv1D

    from trainfit.jobs.models.dora import CompilableDora

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
    for module in model.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = CompilableDora
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Small updates vanish in bf16 weights, and adapters in float32 take little memory.
            parameter.data = parameter.data.float()


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
