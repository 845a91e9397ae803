"""Configuration of a job, with what its data and model choose, and a classifier's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.conf import SCHEMAS, Composed, NliConfig, TextFilesConfig, compose, layer
from trainfit.conf.composition import as_word, completed, keys
from trainfit.conf.schema import Config, EncoderModel, GptConfig, TokensConfig
from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.data.columnar import is_stream
from trainfit.data.corpus import find_texts
from trainfit.data.hub import may_be_on_hub
from trainfit.data.labels import LabelKind, describe
from trainfit.data.redsm5 import check_redsm5
from trainfit.data.text_files import (
    check_columns,
    check_first_rows,
    count_tags,
    infer_labels,
    read_chunks,
)
from trainfit.data.token_files import is_prepared, read_header
from trainfit.data.tokenizers import NO_TOKENIZER_FIX, has_tokenizer
from trainfit.hardware.catalogue import GpuSpec
from trainfit.hardware.model_shapes import model_shape, width_of
from trainfit.jobs.job_plan import check_model
from trainfit.jobs.known_data import columns_of, files_of, settle_sources
from trainfit.jobs.models.classifier_settings import Weights, model_fields
from trainfit.jobs.plan_choices import fitted
from trainfit.jobs.registry import is_own, load

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer

EncoderConfig = NliConfig | TextFilesConfig
_FREEZE = "model.freeze_encoder"
"""Key that presets and experiments set for pretrained encoders; random ones must train."""
_OF_CHARACTERS = ("canine", "perceiver")
"""Model types whose tokenizer needs no file."""
_LEAST = 50
"""Minimum occurrences of a piece of user data before it becomes a token."""
_MOST_WORDS = 8192
"""Largest vocabulary to learn; a model may have room for more."""


def configure(task: str, overrides: Sequence[str]) -> Composed:
    """Compose the configuration; without data and model, that of the small experiment.

    Paths, columns and names are checked here, before torch is imported.
    """
    composed = settle_sources(_filled(task, overrides))
    check_data(composed.config)
    composed = fit_to_data(_with_notes(composed))
    if not is_own(task):
        composed = _fit_length(composed, check_model(composed).positions)
    model = getattr(composed.config, "model", None)
    if not isinstance(model, EncoderModel) or not _lacks_tokenizer(Path(model.name)):
        return composed
    if model.weights != "random":
        raise BadInput(f"no tokenizer in {model.name}", NO_TOKENIZER_FIX)
    note = f"no tokenizer in {model.name}: one is learned from the data (model.weights=random)"
    return replace(composed, notes=(*composed.notes, note))


def _fit_length(composed: Composed, positions: int | None) -> Composed:
    """Shorten the sequences to the positions of the model; refuse a longer length of the user."""
    data: Any = composed.config.data
    if positions is None or data.max_length <= positions:
        return composed
    name, key = composed.config.model.name, "data.max_length"
    what = f"{key} is {data.max_length}, but {name} has {positions} positions"
    if composed.origins[key] == "override":
        raise BadInput(what, f"set it to {positions} or less")
    config: Any = composed.config
    return replace(
        composed,
        config=replace(config, data=replace(data, max_length=positions)),
        origins=composed.origins | {key: "found"},
        notes=(*composed.notes, f"{what}: {positions} is taken"),
    )


def check_data(config: Config) -> None:
    """Raise BadInput for data that cannot be read or lacks a column, by its first rows."""
    if isinstance(config, NliConfig) and config.data.data_dir is not None:
        check_redsm5(config.data.data_dir)
    elif isinstance(config, GptConfig) and config.data.data_dir is not None:
        place = Path(config.data.data_dir)
        read_header(place) if is_prepared(place) else find_texts(place)
    elif isinstance(config, TextFilesConfig):
        _check_files(config)


def _check_files(config: TextFilesConfig) -> None:
    """Raise BadInput for files that lack a column, and for mistakes in rows.

    The first ones are read, or all where words and tags must go together.
    """
    if config.data.train is None:
        return
    files = list(files_of(config.data))
    for path, columns in files:
        check_columns(path, columns)
    kind = kind_of(config)
    known: Sequence[str] | None = None
    for path, columns in files:
        if columns.tagged:
            count_tags(path, columns)
        else:
            known = check_first_rows(path, columns, kind, known)


def kind_of(config: TextFilesConfig) -> LabelKind:
    """Kind of a job's labels: as configured, or as the training file's first rows look."""
    data = config.data
    if data.train is None:
        return LabelKind(target="single" if data.target == "auto" else data.target)
    return infer_labels(Path(data.train), columns_of(data), data.target)


def metric_of(composed: Composed) -> str:
    """Name the metric that chooses a job's best checkpoint."""
    if is_own(composed.task):
        return load(composed.task).metric
    config = composed.config
    if isinstance(config, GptConfig):
        return "val_loss"
    if not isinstance(config, TextFilesConfig):
        return "f1"
    return {"regression": "rmse", "single": "macro_f1"}.get(kind_of(config).target, "f1")


def _with_notes(composed: Composed) -> Composed:
    """Add notes on what was inferred from the labels, and on a model that was not named."""
    config, notes = composed.config, list(composed.notes)
    if not isinstance(config, TextFilesConfig) or config.data.train is None:
        return composed
    if isinstance(config, TokensConfig):
        first = next(read_chunks(Path(config.data.train), columns_of(config.data), 1), None)
        tags = first.labels[0] if first else ()
        if isinstance(tags, tuple) and tags and tags[0].isdecimal():  # all are of one kind
            notes.append("tags are numbers without names: words are scored, not spans of them")
    elif config.data.target == "auto":
        fix = "set data.target to single, multi or regression where that is wrong"
        notes.append(f"labels: {describe(kind_of(config))}; {fix}")
    if composed.origins["model.name"] == "default":
        name = config.model.name
        notes.append(f"no model is named: {name}, small and for many languages (model.name)")
    return replace(composed, notes=tuple(notes))


def _lacks_tokenizer(folder: Path) -> bool:
    """True for a model folder without tokenizer files; nothing is loaded."""
    if not folder.is_dir() or has_tokenizer(folder):
        return False
    try:
        kind = codec.read_object(folder / "config.json")["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # whoever loads it says more
    return str(kind) not in _OF_CHARACTERS


def _filled(task: str, overrides: Sequence[str]) -> Composed:
    composed = compose(task, overrides)
    if is_own(task) or not made_up(composed) or composed.origins["model.name"] != "default":
        return composed
    name = f"{task}_embedded"
    free = {
        key: value
        for key, value in layer(task, "experiment", name).items()
        if composed.origins[key] == "default"
        or (key == _FREEZE and composed.origins[key] != "override")
    }
    words = [as_word(key, value) for key, value in free.items()]
    filled = compose(task, [*overrides, *words])
    data = "the source of Python's standard library" if task == "gpt" else "synthetic data"
    note = f"no data is named: {data} and a small model (experiment={name})"
    origins = filled.origins | dict.fromkeys(free, f"experiment {name}")
    return replace(filled, origins=origins, notes=(*composed.notes, note))


def configured_by(run: Path, task: str) -> Composed:
    """Read the configuration that a run was started with."""
    path = run / "config.json"
    try:
        written = codec.decode(_WrittenConfig, codec.read_object(path), str(path))
    except (OSError, ValueError) as error:
        what = f"cannot read {path} ({reason(error)})"
        raise BadInput(what, "give the folder of a run") from None
    if written.task != task:
        raise BadInput(f"{run} is a run of {written.task:.40}", f"resume it as {written.task:.40}")
    return Composed(
        task=task,
        hardware=written.hardware,
        experiment=written.experiment,
        config=codec.decode(SCHEMAS[task], completed(task, written.config), str(path)),
        origins=dict.fromkeys(keys(task), "default") | written.origins,
        notes=(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenConfig:
    """Content of a run's config.json."""

    task: str
    hardware: str
    experiment: str | None
    config: Any
    origins: dict[str, str]


def made_up(composed: Composed) -> bool:
    """True if the user named no data, so that synthetic data is used."""
    config = composed.config
    if isinstance(config, TextFilesConfig):
        return config.data.train is None
    return config.data.data_dir is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Initial weights and their tokenizer."""

    weights: Weights
    tokenizer: Tokenizer

    @property
    def pad_id(self) -> int:
        """Token that pads rows."""
        from trainfit.data.tokenizers import pad_id

        return pad_id(self.tokenizer)


def choose_weights(composed: Composed, texts: Callable[[], Iterable[str]]) -> Chosen:
    """Choose the weights and load the tokenizer, or learn one from `texts`.

    Rare pieces of a user's text get no token of their own, so that no name leaks.
    """
    from trainfit.data.tokenizers import learn_tokenizer, load_tokenizer

    model, invented = composed.config.model, made_up(composed)
    assert isinstance(model, EncoderModel)
    weights, place = _source(model, invented)
    if place is not None:
        return Chosen(weights=weights, tokenizer=load_tokenizer(place))
    size, pad_id = _vocabulary(model.name)
    least, words = 2 if invented else _LEAST, min(size, _MOST_WORDS)
    tokenizer = learn_tokenizer(texts(), vocabulary=words, pad_id=pad_id, least=least)
    return Chosen(weights=weights, tokenizer=tokenizer)


def _source(model: EncoderModel, invented: bool) -> tuple[Weights, str | None]:
    """Return the kind of weights, and the place of the tokenizer or None if it is learned."""
    folder = Path(model.name)
    if folder.is_dir():
        if model.weights != "random":
            return "pretrained", model.name
        return "random", None if _lacks_tokenizer(folder) else model.name
    short = "/" not in model.name
    try:
        hub = model_shape(model.name).hub
    except BadInput:
        if not may_be_on_hub(model.name):
            raise
        hub, short = model.name, False
    if hub is None and model.weights == "pretrained":
        raise BadInput(f"{model.name} has no pretrained weights", "set model.weights=auto")
    if hub is None or model.weights == "random" or (model.weights == "auto" and invented and short):
        return "random", None
    return "pretrained", hub


def _vocabulary(name: str) -> tuple[int, int]:
    """Return the size of a model's embedding and its padding token."""
    fields = model_fields(name)
    size, pad = fields.get("vocab_size"), fields.get("pad_token_id")
    if not isinstance(size, int) or size < 300:
        raise BadInput(
            f"{name} has a vocabulary of {size}",
            "a learned tokenizer needs room for 300 tokens; give a model with its own tokenizer",
        )
    return size, pad if isinstance(pad, int) and 0 <= pad <= 4 else 0


# ── what the data and the model choose where nobody set it ───────────────────────────────────────
# A GPT's model and training follow from its text. Text jobs on few rows take more epochs and
# smaller steps: three epochs of a few hundred rows are a dozen steps, most of them warm-up, after
# which the model still gives one class for everything. They are not stopped early, since on a small
# validation part a score that does not rise for two epochs says little. Learning rates suit
# encoders of BERT's size or larger: smaller ones, adapters and a head alone move too little by
# them.

_SEEN = 6_400
"""Sequences that a model sees in training, at least: 200 steps of 32."""
_MOST_EPOCHS = 20
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
    return _fit_epochs(_fit_rate(composed))


def _fit_epochs(composed: Composed) -> Composed:
    """Choose epochs and steps of few rows, and no early stopping; what is streamed has many."""
    config: Any = composed.config
    free = {key for key, origin in composed.origins.items() if origin == "default"}
    if not free.issuperset(_LENGTH) or is_stream(Path(config.data.train)):
        return composed
    usual = config.training.num_epochs
    rows = _count_rows(config, most=math.ceil(_SEEN / usual))
    epochs = min(_MOST_EPOCHS, math.ceil(_SEEN / rows))
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
