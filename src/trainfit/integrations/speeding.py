"""`trainfit.speed_up(trainer)` and `trainfit.unpadded(model)`: faster steps of the same numbers.

A trainer is transformers' Trainer or a subclass, such as those of sentence-transformers; a model
or a LightningModule is taken too. It stays the object that it is. The class of an unpadded model is
replaced by a subclass of the same name, whose forward drops the padding, so that copies, replicas
on other GPUs and pickles do the same, and so do those who call `model.forward` directly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import RuntimeSettings
from trainfit.integrations.body_graphs import BodyGraphs
from trainfit.integrations.body_state import BodyBlocks
from trainfit.integrations.host_batches import AROUND, fetch_ahead, keep_host_batches
from trainfit.integrations.script_hooks import (
    COMPILED,
    GRAPHS,
    NO_MODEL,
    WITHOUT,
    SpeedUp,
    chosen,
)
from trainfit.integrations.unpadded_calls import (
    PER_COLUMN,
    SETTLED,
    HeadReads,
    Unpadding,
    foreign_part,
    own_forward,
)
from trainfit.integrations.unpadded_forward import FACTS, body_of, run_body, run_head
from trainfit.jobs.models.backbone import traits_of
from trainfit.kernels.supported import OWN_ATTENTION
from trainfit.kernels.unpadded_rows import IMPLEMENTATIONS, own_implementation, register_beside
from trainfit.runtime import apply

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TrainerT = TypeVar("TrainerT")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_PLAIN_ADAMW = "adamw_torch"
_OURS = "_trainfit_changed"
"""Mark of a function of a trainer that was replaced: each of its trainings comes here again."""


def speed_up(
    trainer: TrainerT,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    quiet: bool = False,
) -> TrainerT:
    """Make the steps of a trainer faster, with the same batches, rate and losses.

    Returns the same trainer and prints one line of what was done and what was not. `only` and
    `without` choose among `unpadded`, `graphs` (of unpadded passes, on a GPU), `compile` (blocks
    inside of the graphs), `ahead` (batches of a loader without workers), `nowait` (Trainer's check
    of each loss, done on the GPU), `fused` (AdamW) and `tf32`. The last and `compile`, which takes
    half a minute that nobody here knows to be won back, must be named in `only`.
    """
    found = apply_speedups(trainer, chosen(only, [*without, *([] if only else ["compile"])]))
    if not quiet:
        print(found.line())
    return trainer


def apply_speedups(trainer: Any, names: Collection[str]) -> SpeedUp:
    """Make the named changes to a trainer, a LightningModule or a model."""
    model = trainer if isinstance(trainer, nn.Module) else getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{type(trainer).__name__} has no model",
            "give a Trainer of transformers, a LightningModule or a model",
        )
    done: list[str] = []
    left: list[str] = []
    if "unpadded" in names:
        _unpad(trainer, model, done, left, names)
    elif "graphs" in names:
        left.append(f"{GRAPHS} (they need unpadded)")
    if "ahead" in names and torch.cuda.is_available():  # a CPU has no time to fetch meanwhile
        fetch_ahead()
        done.append("batches fetched ahead")
    if "nowait" in names and not isinstance(trainer, nn.Module):
        _check_there(trainer, done)
    if "fused" in names and not isinstance(trainer, nn.Module):
        _fuse(trainer, done, left)
    if "tf32" in names:
        apply(RuntimeSettings(tf32=True))
        done.append("TF32")
    return SpeedUp(done=tuple(done), left=tuple(left))


def _unpad(
    trainer: Any, model: nn.Module, done: list[str], left: list[str], names: Collection[str]
) -> None:
    graphs, gpu = "graphs" in names, torch.cuda.is_available()
    if (why := foreign_in(model)) is not None:
        left.append(f"{WITHOUT} ({why})")
        return

    def changed(one: nn.Module) -> nn.Module:
        for facts in facts_in(unpadded(one)):
            _prepare(facts, names if gpu else ())
        return one

    try:
        changed(model)
    except BadInput as error:
        left.append(f"{WITHOUT} ({error.what})")
        return
    keep_host_batches()
    done.append(f"{type(model).__name__} {WITHOUT}")
    if graphs:
        (done if gpu else left).append(GRAPHS if gpu else f"{GRAPHS} (no GPU)")
    if "compile" in names and gpu:
        (done if graphs else left).append(COMPILED if graphs else f"{COMPILED} (they need graphs)")
    build = getattr(trainer, "model_init", None)
    if build is not None and not hasattr(build, _OURS):  # train() builds the model again

        @wraps(build)
        def built(*args: Any, **kwargs: Any) -> Any:
            return changed(build(*args, **kwargs))

        setattr(built, _OURS, True)
        trainer.model_init = built


def _prepare(facts: Unpadding, names: Collection[str]) -> None:
    """Set up one model of a script that is not known."""
    facts.strange = True
    if facts.reads == "outside":
        facts.reads = "unknown"
    facts.watch_anew()
    if "graphs" in names:
        facts.graphs = facts.graphs or BodyGraphs()
        if "compile" in names:
            facts.graphs.blocks = facts.graphs.blocks or BodyBlocks()


def _check_there(trainer: Any, done: list[str]) -> None:
    """Filter losses that are not finite on the GPU, where Trainer would wait for each of them."""
    arguments: Any = getattr(trainer, "args", None)
    method: Any = getattr(trainer, "training_step", None)
    filters = getattr(arguments, "logging_nan_inf_filter", False)
    filters = filters and arguments.device.type == "cuda"
    if not filters or not hasattr(trainer, "add_callback") or hasattr(method, _OURS):
        return
    from transformers import TrainerCallback

    class Restore(TrainerCallback):
        def on_step_end(self, *_: Any, **_rest: Any) -> None:
            arguments.logging_nan_inf_filter = True

        on_substep_end = on_step_end

    @wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        loss, total = method(*args, **kwargs), getattr(trainer, "_tr_loss", None)
        off = total is None or not isinstance(loss, Tensor) or AROUND.off
        arguments.logging_nan_inf_filter = off
        if off or total is None:
            return loss
        # Trainer's own rule: such a loss counts as the mean of those since the last log.
        since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(torch.isfinite(loss), loss, total / since)

    setattr(step, _OURS, True)
    trainer.training_step = step
    trainer.add_callback(Restore())
    done.append("no wait for each loss")


def _fuse(trainer: Any, done: list[str], left: list[str]) -> None:
    arguments: Any = getattr(trainer, "args", None)
    kind = getattr(arguments, "optim", None)
    if kind is None:
        return
    name = str(getattr(kind, "value", kind))
    if name == f"{_PLAIN_ADAMW}_fused":
        return
    if name != _PLAIN_ADAMW or trainer.optimizer is not None:
        left.append("fused AdamW (the script has an optimizer of its own)")
    elif arguments.device.type != "cuda":
        left.append("fused AdamW (no GPU)")
    else:
        arguments.optim = type(kind)(f"{_PLAIN_ADAMW}_fused")
        done.append("fused AdamW")


# ── models without padding ────────────────────────────────────────────────────────────────────────


FAMILIES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert"),
    *(*OWN_ATTENTION, "modernbert", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2"),
    *("qwen3", "phi", "phi3", "olmo2", "smollm3", "gpt_neox", "gpt2", "opt"),
)
"""Model types whose packed outputs were compared with the padded ones."""
_SHIFTED = ("ForCausalLM", "LMHeadModel")


def unpadded(model: ModuleT, *, insist: bool = False) -> ModuleT:
    """Make a transformers model, or those inside of a module, compute nothing on padding.

    Returns the same object; weights, signature and outputs stay. Hidden states and logits of padded
    columns are zero. A batch that cannot go without padding goes the model's own way, and the
    reason is logged once; so does a DeBERTa in float32 on a GPU, which is slower without, unless
    you `insist`. Raises BadInput for a model that can never.
    """
    found = list(_outermost(model))
    if not found:
        raise BadInput(
            f"{type(model).__name__} {NO_MODEL}",
            "give a model of transformers, or a module that contains one",
        )
    taken = [(one, *_taken(one, alone=one is _without_adapters(model))) for one in found]
    for one, body, facts in taken:
        known: Unpadding | None = body.__dict__.get(FACTS)
        if known is None:
            _replace(one, body, facts)
        elif known.reads in ("outside", *SETTLED) and (
            known.reads != facts.reads or _goes_past(one, facts)
        ):
            known.reads = "unknown"  # heads share the body, and read it in different ways
        body.__dict__[FACTS].insisted |= insist
        body.__dict__[FACTS].watch_anew()
    return model


def padded(model: ModuleT) -> ModuleT:
    """Undo `unpadded`: the model pads again as it did. Returns the same object."""
    for module in list(model.modules()):
        facts = module.__dict__.pop(FACTS, None)
        if facts is not None and facts.own is not None:
            module.set_attn_implementation(facts.own)  # type: ignore[operator]
        if (kind := getattr(type(module), "_trainfit_kind", None)) is not None:
            module.__class__ = kind
    return model


def facts_in(model: nn.Module) -> list[Unpadding]:
    """Return the facts of the unpadded models in a module."""
    return [one.__dict__[FACTS] for one in model.modules() if FACTS in one.__dict__]


def foreign_in(model: nn.Module) -> str | None:
    """Name a layer or a hook of the script's own that keeps the padding of a model."""
    for one in _outermost(model):
        per_column = type(one).__name__.endswith(PER_COLUMN)
        if (found := foreign_part(one if per_column else body_of(one))) is not None:
            return found
    return None


def _outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the models of transformers' own classes that are in no other one."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers."):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside of peft's wrappers."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def _taken(model: PreTrainedModel, *, alone: bool) -> tuple[PreTrainedModel, Unpadding]:
    """Look up how a model can go without padding."""
    body: PreTrainedModel = body_of(model)
    if (reason := _model_obstacle(body)) is not None:
        raise BadInput(
            f"{type(model).__name__} cannot go without padding: {reason}",
            "leave it padded; BERT, RoBERTa, ModernBERT, DeBERTa-v3, Gemma, Llama and Qwen work",
        )
    own = own_implementation(body.config._attn_implementation)
    traits, shifted = traits_of(body), type(model).__name__.endswith(_SHIFTED)
    return body, Unpadding(
        traits=traits,
        family=body.config.model_type,
        own=None if body.config.model_type in OWN_ATTENTION else own,
        reads=_reads(model, body, alone),
        shifted=shifted,
        caches=traits.causal and (shifted or (alone and model is model.base_model)),
    )


def _model_obstacle(body: PreTrainedModel) -> str | None:
    config = body.config
    if own_forward(body):
        return f"the forward of {type(body).__name__} was replaced by another one"
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type} were not compared with their padded selves"
    if config.model_type in OWN_ATTENTION and not getattr(config, "relative_attention", True):
        return "its attention reads no distances"
    if config.model_type in OWN_ATTENTION and getattr(config, "conv_kernel_size", None):
        return "it has a convolution, which reaches over the ends of packed sequences"
    if config.model_type in OWN_ATTENTION:
        return None
    own = own_implementation(config._attn_implementation)
    if own not in IMPLEMENTATIONS:
        return f"its attention implementation is {own}; load it with attn_implementation='sdpa'"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn is set"
    return None


def _reads(model: PreTrainedModel, body: PreTrainedModel, alone: bool) -> HeadReads:
    """Columns that the head of one of transformers' classes reads."""
    name = type(model).__name__
    if model is model.base_model:
        return "outside" if alone else "unknown"
    if own_forward(model):
        return "unknown"
    if name.endswith(PER_COLUMN):
        return "unknown" if getattr(model.config, "sparse_prediction", False) else "columns"
    if not name.endswith("ForSequenceClassification"):
        return "unknown"
    if any(getattr(module, "is_causal", False) for module in body.modules()):
        return "last"
    return "columns" if getattr(model.config, "classifier_pooling", None) == "mean" else "first"


def _replace(model: PreTrainedModel, body: PreTrainedModel, facts: Unpadding) -> None:
    """Give the body, and a head that has a result per column, the forward without padding."""
    if facts.own is None:
        from trainfit.kernels.disentangled_layers import take_packed_rows

        take_packed_rows(body)
    else:
        body.set_attn_implementation(register_beside(facts.own))
    body.__dict__[FACTS] = facts
    kinds: list[Any] = [type(body), type(model)]
    body.__class__ = _unpadded_class(kinds[0], True)
    if model is not body and _goes_past(model, facts):
        model.__class__ = _unpadded_class(kinds[1], False)


def _goes_past(model: PreTrainedModel, facts: Unpadding) -> bool:
    """Tell if a head reads known columns, and has not its forward without padding yet."""
    return facts.reads in SETTLED and not hasattr(type(model), "_trainfit_kind")


# ── the class of a model without padding ──────────────────────────────────────────────────────────


@cache
def _unpadded_class(kind: Any, is_body: bool) -> Any:
    """Make the subclass of a model's class that drops padding, under the same name.

    transformers writes the name into config.json and looks up by it which outputs it can record.
    """
    run = run_body if is_body else run_head

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return kind.forward(self, *args, **kwargs)
        return run(self, kind, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, arguments, *rest = super(made, self).__reduce_ex__(protocol)
        own = getattr(self.__dict__.get(FACTS), "own", None)
        return (_rebuild, (kind, is_body, own, *arguments[1:]), *rest)

    names = ("__module__", "__qualname__", "__doc__")
    members: dict[str, Any] = {name: getattr(kind, name) for name in names}
    members |= {"forward": forward, "__reduce_ex__": reduce, "_trainfit_kind": kind}
    made = type(kind)(kind.__name__, (kind,), members)
    return made


def _rebuild(kind: Any, is_body: bool, own: str | None, *arguments: Any) -> nn.Module:
    """Make an empty model for a copy or a pickle, which may be read in another process."""
    if own is not None:
        register_beside(own)
    made = _unpadded_class(kind, is_body)
    module: nn.Module = made.__new__(made, *arguments)
    return module
