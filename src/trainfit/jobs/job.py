"""`trainfit.Job`: a training job of one's own, in one class.

    class Images(trainfit.Job):
        metric = "accuracy"
        class Config:
            width: int = 64
            lr: float = trainfit.tunable(3e-3, low=1e-4, high=1e-2, log=True)
        def data(self, split): ...
        def model(self): ...
        def loss(self, model, batch): ...

`trainfit train my_module:Images` then plans, trains, verifies and reports it. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainfit.core.codec import hints
from trainfit.core.errors import BadInput

if TYPE_CHECKING:
    import torch

LESS_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse")
TRAINING_KEYS = {
    "lr": "training.learning_rate",
    "learning_rate": "training.learning_rate",
    "effective_batch": "training.effective_batch_size",
    "effective_batch_size": "training.effective_batch_size",
    "epochs": "training.num_epochs",
    "num_epochs": "training.num_epochs",
    "weight_decay": "training.weight_decay",
    "max_steps": "training.max_steps",
    "warmup_ratio": "training.warmup_ratio",
    "seed": "seed",
}
"""Fields of a Config that set one of trainfit's own keys: the loop reads those."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """A default value and the range that `trainfit hpo` searches."""

    default: Any
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()


def tunable(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    choices: Sequence[Any] = (),
) -> Any:
    """Mark a field of a job's Config for `trainfit hpo`: a range from `low` to `high`, or choices.

    `log` searches a range evenly over its magnitudes. The default is what `train` uses.
    """
    if (low is None) != (high is None) or (low is None) == (not choices):
        raise BadInput("tunable needs low and high, or choices", "give one of the two")
    if low is not None and high is not None and not low < high:
        raise BadInput(f"tunable goes from {low} to {high}", "give a low that is less than high")
    return Tunable(default, low, high, log, tuple(choices))


_VALUES = (bool, int, float, str, list, tuple, dict, set, Tunable)
"""Values that look like fields of a Config."""


class Job:
    """A job of one's own. Subclass it; `data`, `model` and `loss` are required.

    An instance has `self.config`, with the fields of the nested class Config.
    """

    metric: ClassVar[str] = "loss"
    """The figure of `evaluate` that chooses the best checkpoint and that `hpo` optimizes."""
    greater_is_better: ClassVar[bool | None] = None
    """None: by the metric's name, less for a loss or an error and greater for anything else."""
    indivisible: ClassVar[bool] = False
    """True where the loss does not add up over parts of a step, as for a contrastive loss."""

    class Config:
        """Fields with a type and a default; subclasses replace it."""

    def __init__(self, config: Any = None) -> None:
        """`config` is an instance of the job's Config; None takes its defaults."""
        self.config: Any = config_class(type(self))() if config is None else config

    def data(self, split: str) -> Any:
        """Return the dataset of "train", "validation" or "test": anything with len() and [index].

        `None` for "test" scores the validation data. A dataset whose samples differ in length has
        an attribute `lengths`.
        """
        del split
        raise self._lacks("data(self, split)")

    def model(self) -> torch.nn.Module:
        """Return a new model."""
        raise self._lacks("model(self)")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return one loss per sample of the batch, or their sum where `indivisible`."""
        del model, batch
        raise self._lacks("loss(self, model, batch)")

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return figures on validation or test batches; by default the mean loss."""
        total, count = 0.0, 0
        for batch in batches:
            losses = self.loss(model, batch)
            total, count = total + float(losses.sum()), count + losses.numel()
        return {"loss": total / max(count, 1)}

    def collate(self, items: list[Any]) -> Any:
        """Return the batch of these samples: tensors in any nesting of lists, tuples and dicts."""
        from torch.utils.data import default_collate

        return default_collate(items)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer; None takes the planned AdamW with the configured rate."""
        del model
        return None

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Do something after each update of the weights, such as an average of them."""

    def predict(self, model: torch.nn.Module, item: Any) -> Any:
        """Return the answer for one item of `trainfit predict`, as plain JSON values."""
        del model, item
        raise self._lacks("predict(self, model, item)")

    def _lacks(self, method: str) -> BadInput:
        """Name a method that the class must define for what was asked."""
        name = method.partition("(")[0]
        return BadInput(f"{type(self).__name__} has no {name}", f"define {method}")

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write what is needed to use the model elsewhere, beside its weights."""


def is_greater_better(job: type[Job]) -> bool:
    """Tell the direction of a job's metric."""
    said = job.greater_is_better
    return not less_is_better(job.metric) if said is None else said


def less_is_better(metric: str) -> bool:
    """Tell by its name whether a metric is a loss or an error."""
    return any(metric == name or metric.endswith(f"_{name}") for name in LESS_IS_BETTER)


def config_class(job: type[Job]) -> Any:
    """Return the dataclass of a job's Config, or raise BadInput for a field without a default."""
    rows: list[tuple[str, Any, Any]] = []
    types = _annotations(job.Config)
    for name, value in vars(job.Config).items():
        if name not in types and not name.startswith("_") and isinstance(value, _VALUES):
            kind = type(value.default if isinstance(value, Tunable) else value).__name__
            what = f"{job.__name__}.Config.{name} has no type, so that it would be ignored"
            raise BadInput(what, f"write {name}: {kind} = …")
    for name, kind in types.items():
        if not hasattr(job.Config, name):
            raise BadInput(f"{job.__name__}.Config.{name} has no default", "give it one")
        value = getattr(job.Config, name)
        default = value.default if isinstance(value, Tunable) else value
        if isinstance(default, list | dict | set):
            what = f"{job.__name__}.Config.{name} is a {type(default).__name__}"
            raise BadInput(what, f"use a tuple, such as {name}: tuple[int, ...] = (16, 8)")
        rows.append((name, kind, field(default=default)))
    namespace = {
        k: v for k, v in vars(job.Config).items() if callable(v) and not k.startswith("__")
    }
    return make_dataclass(
        f"{job.__name__}Config", rows, namespace=namespace, frozen=True, kw_only=True
    )


def tunables(job: type[Job]) -> Mapping[str, Tunable]:
    """Return the fields of a job's Config that `hpo` searches."""
    found = {name: getattr(job.Config, name, None) for name in _annotations(job.Config)}
    return {name: value for name, value in found.items() if isinstance(value, Tunable)}


def _annotations(config: type) -> dict[str, Any]:
    try:
        return dict(hints(config))
    except (NameError, TypeError) as error:
        what = f"cannot read the types of {config.__qualname__} ({error})"
        raise BadInput(what, "use int, float, bool, str or Literal") from None
