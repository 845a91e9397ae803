"""Settings that the data and the model choose where nobody set them.

A GPT's model and training follow from its text. Text jobs on few rows take more epochs and smaller
steps: three epochs of a few hundred rows are a dozen steps, most of them warm-up, after which the
model still gives one class for everything. They are not stopped early, since on a small validation
part a score that does not rise for two epochs says little.

Learning rates suit encoders of BERT's size or larger. Smaller ones, adapters and a head alone move
too little by them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.conf.schema import TextFilesConfig
from trainfit.data.columnar import is_stream
from trainfit.data.text_files import infer_labels, read_chunks
from trainfit.hardware.catalogue import GpuSpec
from trainfit.hardware.model_shapes import width_of
from trainfit.jobs.known_data import files_of
from trainfit.jobs.models.classifier_settings import model_fields
from trainfit.jobs.plan_choices import fitted

_SEEN = 6_400
"""Sequences that a model sees in training, at least: 200 steps of 32."""
_MOST = 20
"""Most epochs: the same rows more often teach little."""
_SMALL_STEP = 16
"""Sequences of a step where even that many epochs are fewer."""
_LENGTH = ("training.num_epochs", "training.max_steps")
_CUT = (
    *("training.effective_batch_size", "training.batch_size"),
    "optimization.gradient_accumulation_steps",
)
_PATIENCE, _RATE = "training.early_stopping_patience", "training.learning_rate"
_SMALL_WIDTH, _SMALL_RATE = 512, 5e-5
"""Width of the encoders below BERT-base (MiniLM, e5-small, BERT-medium), and their rate."""
_ADAPTER_RATE, _HEAD_RATE = 2e-4, 1e-3


def fit_to_data(composed: Composed, gpu: GpuSpec | None = None) -> Composed:
    """Choose what is left to data and model; `gpu` is a GPU that is not in this machine."""
    config = composed.config
    if not isinstance(config, TextFilesConfig):
        return fitted(composed, gpu)
    if config.data.train is None:
        return composed
    return _fit_length(_fit_rate(composed))


def _fit_length(composed: Composed) -> Composed:
    """Choose epochs and steps of few rows, and no early stopping; what is streamed has many."""
    config: Any = composed.config
    free = {key for key, origin in composed.origins.items() if origin == "default"}
    if not free.issuperset(_LENGTH) or is_stream(Path(config.data.train)):
        return composed
    usual = config.training.num_epochs
    rows = _count_rows(config, most=math.ceil(_SEEN / usual))
    epochs = min(_MOST, math.ceil(_SEEN / rows))
    if epochs <= usual:
        return composed
    chosen: dict[str, Any] = {"num_epochs": float(epochs)}
    said = f"{epochs} epochs instead of {usual:g}"
    if _PATIENCE in free:
        chosen["early_stopping_patience"] = None
    if rows * epochs < _SEEN and free.issuperset(_CUT):
        chosen["effective_batch_size"] = _SMALL_STEP
        said += f", {_SMALL_STEP} rows a step"
    note = f"about {rows:,} rows to train on: {said} (--epochs chooses otherwise)"
    return _with(composed, chosen, "the rows", note)


def _count_rows(config: TextFilesConfig, most: int) -> int:
    """Count the rows to train on, without those held out, up to about `most`."""
    data = config.data
    kept = 1.0 if data.test is not None else 1 - data.test_share
    if config.cv.folds is not None:
        kept *= 1 - 1 / config.cv.folds
    if data.validation is None:
        kept *= 1 - data.validation_share
    path, columns = next(files_of(data))
    kind = infer_labels(path, columns, data.target)
    chunks = islice(read_chunks(path, columns, 1, kind=kind), math.ceil(most / kept))
    return max(1, round(sum(len(chunk.labels) for chunk in chunks) * kept))


def _fit_rate(composed: Composed) -> Composed:
    """Choose the learning rate of a small encoder, of adapters, or of a head alone."""
    config: Any = composed.config
    model, usual = config.model, config.training.learning_rate
    if composed.origins[_RATE] != "default" or model.weights == "random":
        return composed
    if model.freeze_encoder is True:
        rate, why = _HEAD_RATE, "the head alone is trained"
    elif model.method != "full":
        rate, why = _ADAPTER_RATE, f"adapters are trained ({model.method})"
    elif width := width_of(model_fields(model.name)):
        rate, why = (_SMALL_RATE if width <= _SMALL_WIDTH else usual), "the model is small"
    else:
        return composed
    if rate <= usual:
        return composed
    note = f"{why}: a learning rate of {rate:g} instead of {usual:g} (--lr chooses otherwise)"
    return _with(composed, {"learning_rate": rate}, "the model", note)


def _with(composed: Composed, chosen: dict[str, Any], origin: str, note: str) -> Composed:
    """Return the configuration with these fields of its training."""
    config: Any = composed.config
    return replace(
        composed,
        config=replace(config, training=replace(config.training, **chosen)),
        origins=composed.origins | {f"training.{name}": origin for name in chosen},
        notes=(*composed.notes, note),
    )
