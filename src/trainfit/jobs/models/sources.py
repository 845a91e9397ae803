"""Config and weights of an encoder, from the catalogue, a folder, the hub or a config.

Blocks that are quantized are so while they are built, one matrix at a time; embeddings, norms,
biases and whatever is outside the repeated blocks keep their dtype.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainfit.core.errors import BadInput, TrainfitWarning, refusing
from trainfit.core.libraries import import_generation
from trainfit.core.plan_records import Quantization
from trainfit.data.model_files import plain_config, read_config, read_weights, unreadable
from trainfit.data.tokenizers import quiet_transformers
from trainfit.engine.saved_state import find_nonfinite
from trainfit.hardware.host import check_room
from trainfit.hardware.model_shapes import (
    ModelShape,
    check_fields,
    model_shape,
    transformers_config,
)
from trainfit.jobs.models.classifier_settings import Weights
from trainfit.kernels.quantized import QuantizedLinear
from trainfit.runtime import repeated_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "gemma3_text": {"use_bidirectional_attention": True},
    "gemma2": {"use_bidirectional_attention": True, "is_causal": False},
    "gemma": {"use_bidirectional_attention": True, "is_causal": False},
}
"""Fields that make attention bidirectional in plain transformers, beside or for is_causal."""


_PLAIN_CALLS: dict[str, Any] = {
    "use_cache": False,
    "return_dict": True,
    "chunk_size_feed_forward": 0,
}
"""Fields that change how a model is called, and not what it computes."""


def find(
    source: str | PretrainedConfig,
    weights: Weights,
    overrides: dict[str, Any],
    *,
    published: bool = False,
) -> tuple[PretrainedConfig, str | None]:
    """Return the config, and the place of the weights or None for random ones.

    The config is bidirectional, or says what the `published` one says.
    """
    if not isinstance(source, str):
        if weights == "pretrained":
            raise BadInput("a config has no pretrained weights", "name a folder or a model")
        return _configured(source.to_dict(), overrides, "the config", published), None
    shape = None if Path(source).is_dir() else _in_catalogue(source)
    if shape is not None and (weights == "random" or (weights == "auto" and "/" not in source)):
        return transformers_config(shape, **_changes(shape.config, overrides, published)), None
    place = shape.hub if shape is not None and shape.hub is not None else source
    config = _configured(read_config(place), overrides, place, published)
    return config, None if weights == "random" else place


def create(
    config: PretrainedConfig,
    place: str | None,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    *,
    published: bool = False,
) -> PreTrainedModel:
    """Create a model, `published` with its pooler, of `place` or random; quantize its blocks."""
    import_generation()
    if place is None:
        text = config.get_text_config()
        with refusing(partial(unbuildable, text.model_type)):
            _check_room(text, dtype, quantization)
            return draw(partial(_random, text, dtype), quantization, dtype)
    named = f"{dtype} {quantization} {published}"
    kept, key = _KEPT.get(), (place, named, config.to_json_string())
    if kept is not None and key in kept:
        return _again(kept[key])
    device = torch.get_default_device()
    narrow = quantization != "none" and device.type != "meta"
    with torch.device("cpu") if narrow else nullcontext():
        model, complete = _read(config, place, dtype, as_stored=narrow, pooler=published)
    if name := find_nonfinite(model):  # a damaged file would spoil every step
        raise BadInput(f"the weight {name} of {place} is not finite", "get another copy of it")
    if quantization != "none":
        quantize_blocks(model, quantization, device, dtype)
    if kept is not None and complete:
        for oldest in list(kept)[: 1 - _MOST_KEPT]:
            del kept[oldest]
        kept[key] = model
        return _again(model)
    return model


def _random(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModel

    made: PreTrainedModel = AutoModel.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, trust_remote_code=False
    )
    return made


def _again(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy; on its way to a GPU it needs no weights of its own."""
    tensors = [*model.parameters(), *model.buffers()] if _BORROWED.get() else []
    return copy.deepcopy(model, {id(each): _alias(each) for each in tensors})


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor, or parameter, with the same memory."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()


def _read(
    config: PretrainedConfig,
    place: str,
    dtype: torch.dtype,
    *,
    as_stored: bool = False,
    pooler: bool = False,
) -> tuple[PreTrainedModel, bool]:
    """Read a model; True where all of its weights were there, its `pooler`'s too if it is used.

    Random numbers for those that were not leave no trace in the generator: what is drawn later is
    the same if the model comes from memory. `as_stored` leaves linear layers of blocks in the dtype
    of the file, which is then mapped and not copied.
    """
    with (
        refusing(partial(unreadable, place)),
        without_bars(),
        quiet_transformers(),  # a table with names that are anyone's
        torch.random.fork_rng(devices=[]),
    ):
        # Give tensors and no folder, in which transformers would find much else to load.
        state = read_weights(place)
        kind: Any = _class_of(config)
        stored = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
        as_stored = as_stored and len(stored) == 1
        whole, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=stored.pop() if as_stored else dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing = _missing(whole, info, place)
    # Only the text part of a model of text and images is used.
    model: PreTrainedModel = getattr(whole, "language_model", whole)
    if as_stored:
        _convert(model, dtype)
    return model, not (info["missing_keys"] if pooler else missing)


def _missing(model: nn.Module, info: Mapping[str, Any], place: str) -> list[str]:
    """List the weights that are not in the files, but for a pooler's, and warn of them.

    Raises BadInput where there is none of them, or one of another shape.
    """
    fix = "get another copy of it, or set model.weights=random"
    for name, found, wanted in sorted(info["mismatched_keys"]):
        shapes = f"{tuple(found)}, and {tuple(wanted)} by its config"
        raise BadInput(f"the weight {name} of {place} is {shapes}", fix)
    missing: list[str] = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if info["missing_keys"].issuperset(name for name, _ in model.named_parameters()):
        raise BadInput(f"{place} has none of the weights that its config describes", fix)
    if missing:
        some = f"{len(missing)} weights of {place} are not in its files and start at random"
        warnings.warn(f"{some}, such as {missing[0]}", TrainfitWarning, stacklevel=2)
    return missing


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert all but the linear layers of blocks to the dtypes of a model that is made in `dtype`.

    Tables of rotations, for one, stay in float32.
    """
    with torch.device("meta"):
        kind: Any = type(model)
        like = kind._from_config(model.config, dtype=dtype)
    narrow = {id(layer.weight) for layer in _linears(model)}
    dtypes = {name: tensor.dtype for name, tensor in like.state_dict(keep_vars=True).items()}
    dtypes |= {name: buffer.dtype for name, buffer in like.named_buffers()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in narrow:
            tensor.data = tensor.data.to(dtypes[name])
    model.config.dtype = dtype


_KEPT: ContextVar[dict[tuple[str, str, str], PreTrainedModel] | None] = ContextVar(
    "kept", default=None
)
"""Models that were read inside `kept_in_memory`."""
_BORROWED: ContextVar[bool] = ContextVar("borrowed", default=False)
"""True: models that are built again have the weights of the kept one, in the same memory."""
_MOST_KEPT = 2
"""Trials of a study may differ in their config, as in dropout: each would be another model."""


@contextmanager
def kept_in_memory(*, borrowed: bool = False) -> Iterator[None]:
    """Read each model once inside a block, and build it from host memory from then on.

    `borrowed` weights are not copied: only for models that are moved to a GPU, and trained there.
    """
    tokens = _KEPT.set({}), _BORROWED.set(borrowed)
    try:
        yield
    finally:
        _KEPT.reset(tokens[0])
        _BORROWED.reset(tokens[1])


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that AutoModel takes for a config."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"transformers has no model of the type {config.model_type}")
    found: Any = MODEL_MAPPING[type(config)]
    kind: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return kind


def _check_room(config: PretrainedConfig, dtype: torch.dtype, quantization: Quantization) -> None:
    """Raise BadInput before weights are allocated that do not fit this machine."""
    if torch.get_default_device().type == "meta":
        return
    with torch.device("meta"):
        model = draw(partial(_random, config, dtype), quantization, dtype)
    check_room(sum(one.nbytes for one in model.parameters()), config.model_type)


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, which would interrupt trainfit's."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence transformers and trainfit about a model that is built only to see if it can be."""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _configured(
    fields: dict[str, Any], overrides: dict[str, Any], place: str, published: bool
) -> PretrainedConfig:
    """Build a config with the overrides in it, since Gemma 3 halves its window only then."""
    import_generation()
    from transformers import AutoConfig

    fields = plain_config(fields, place)
    text = fields.get("text_config")
    if text is None:
        fields = fields | _changes(fields, overrides, published)
    else:
        fields = fields | {"text_config": text | _changes(text, overrides, published)}
    check_fields(fields, place)
    with refusing(partial(unbuildable, f"{fields.get('model_type')} of {place}")):
        config: PretrainedConfig = AutoConfig.for_model(**fields)
        _check_activations(config.get_text_config())
    return config


def _check_activations(config: PretrainedConfig) -> None:
    """Raise ValueError for a name that some models would look up only in their first step."""
    from transformers.activations import ACT2FN

    for name, value in config.to_dict().items():
        if name.endswith(("act", "activation")) and isinstance(value, str) and value not in ACT2FN:
            raise ValueError(f"{name} is {value!r}")


def _changes(fields: dict[str, Any], overrides: dict[str, Any], published: bool) -> dict[str, Any]:
    """Return the overrides and the other changes that make an encoder."""
    both_ways = _BIDIRECTIONAL.get(fields.get("model_type", ""), {"is_causal": False})
    changes = _PLAIN_CALLS | ({} if published else both_ways)
    layers = overrides.get("num_hidden_layers")
    if layers is not None and fields.get("layer_types"):
        changes["layer_types"] = fields["layer_types"][:layers]
    return changes | overrides


def _in_catalogue(name: str) -> ModelShape | None:
    try:
        return model_shape(name)
    except BadInput:
        return None


def unbuildable(what: str, reason: str) -> BadInput:
    """Word the refusal of a config that transformers cannot build."""
    return BadInput(f"cannot build a {what}: {reason}", "give values that transformers knows")


# ── quantized blocks ────────────────────────────────────────────────────────────────────────────


def draw(
    build: Callable[[], PreTrainedModel], kind: Quantization, dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model with random weights; those that are quantized are drawn one by one."""
    device = torch.get_default_device()
    if kind == "none":
        return build()
    with _linears_on_meta():
        model = build()
    if device.type != "meta":
        inside = _linears(model)
        for linear in model.modules():
            if type(linear) is nn.Linear and linear not in inside:
                _draw(model, linear, device)
    quantize_blocks(model, kind, device, dtype)
    return model


def quantize_blocks(
    model: PreTrainedModel, kind: Quantization, device: torch.device, dtype: torch.dtype
) -> None:
    """Quantize the linear layers of the blocks on `device`; weights without values are drawn.

    They are rounded to `dtype` first, one at a time.

    A layer with values stays where it is, so that folds share it in the host's memory.
    """
    inside = _linears(model)
    if not inside:
        raise BadInput(
            f"{model.config.model_type} has no linear layers in its blocks to quantize",
            "set model.quantization=none, or choose another model",
        )
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if linear not in inside or not isinstance(linear, nn.Linear):
                continue
            if linear.weight.is_meta and device.type != "meta":
                _draw(model, linear, device)
            setattr(parent, name, QuantizedLinear.of(linear.to(dtype), kind, device))
            linear.to_empty(device="meta")  # `inside` still holds it


def _linears(model: nn.Module) -> set[nn.Module]:
    """Linear layers inside the repeated blocks; of all the model where no block repeats."""
    blocks = repeated_blocks(model) or [model]
    return {layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear}


def _draw(model: Any, linear: nn.Linear, device: torch.device) -> None:
    """Give a layer without values random ones, as torch and then the model's class draw them."""
    linear.to_empty(device=device)
    linear.reset_parameters()
    model._init_weights(linear)


@contextmanager
def _linears_on_meta() -> Iterator[None]:
    """Build linear layers without values inside a block, and everything else with them."""
    plain = nn.Linear.__init__
    nn.Linear.__init__ = partialmethod(plain, device="meta")  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Linear.__init__ = plain  # type: ignore[method-assign]
