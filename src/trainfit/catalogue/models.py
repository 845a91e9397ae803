"""The shapes of the models the documents name: planned and built by name, without a download."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trainfit.codec import Range, decode
from trainfit.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_GPT = "trainfit_gpt"
"""The `model_type` of trainfit's own GPT, which transformers does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What is published about a model, enough to build it with random weights."""

    slug: str
    hub: str | None
    """The id on the Hugging Face hub; None for trainfit's own models."""
    names: tuple[str, ...]
    """Further spellings that mean the same model."""
    kind: Literal["encoder", "decoder"]
    """As published: a decoder attends backwards only, an encoder both ways."""
    parameters: Annotated[int, Range(1)]
    """The exact number in the backbone, tied weights counted once."""
    parameters_note: str
    """What that number counts, and what it leaves out."""
    source: str
    config: dict[str, Any] = field(hash=False)
    """The fields of its transformers config and `model_type`; read it, do not write to it."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name that `model_shape` takes for it."""
        return (self.slug, *([self.hub] if self.hub else []), *self.names)


@cache
def model_shapes() -> tuple[ModelShape, ...]:
    """Every model of the catalogue."""
    text = resources.files("trainfit.catalogue").joinpath("models.json").read_text(encoding="utf-8")
    return decode(tuple[ModelShape, ...], json.loads(text), "models.json")


@cache
def _by_spelling() -> dict[str, ModelShape]:
    return {name.lower(): shape for shape in model_shapes() for name in shape.spellings}


def model_shape(name: str) -> ModelShape:
    """The model by its slug, hub id or another of its names, in any case."""
    shape = _by_spelling().get(name.strip().lower())
    if shape is not None:
        return shape
    spellings = [spelling for shape in model_shapes() for spelling in shape.spellings]
    slugs = ", ".join(shape.slug for shape in model_shapes())
    near = did_you_mean(name.strip(), spellings, f"the catalogue has {slugs}.")
    raise BadInput(
        f"unknown model {name!r}",
        f"{near} For any other model give a local folder that holds its config.json",
    )


def transformers_config(shape: ModelShape, **overrides: Any) -> PretrainedConfig:
    """A new transformers config of the model, with `overrides` in place before it is built.

    Some fields act only while the config is built (Gemma 3 halves its sliding window when
    `use_bidirectional_attention` is set), so that setting them afterwards is too late.
    """
    if shape.config["model_type"] == OWN_GPT:
        raise BadInput(
            f"{shape.slug} is trainfit's own GPT architecture, not a transformers model",
            "build it with the gpt task, or name a model that is on the hub, such as gpt2",
        )
    from transformers import AutoConfig

    # A config keeps and edits the lists and dicts it is given: the catalogue's own must not change.
    config: PretrainedConfig = AutoConfig.for_model(**deepcopy(shape.config) | overrides)
    return config
