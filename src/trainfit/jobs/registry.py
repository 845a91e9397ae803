"""Jobs by name, and `trainfit.Job`: a training job of one's own, in one class.

`trainfit train my_module:Images` plans, trains, verifies and reports it. Importing this module
imports no torch.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainfit.conf.composition import register
from trainfit.conf.schema import OwnConfig
from trainfit.core.codec import hints
from trainfit.core.errors import (
    BadInput,
    TrainfitError,
    brief,
    did_you_mean,
    in_one_line,
    reason,
    user_line,
)
from trainfit.core.files import prints_aside

if TYPE_CHECKING:
    import torch

_LESS_IS_BETTER = "loss logloss nll error mse rmse mae mape perplexity ppl wer cer distance fid"
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
        """Return figures on validation or test batches; by default the mean loss of their rows."""
        from torch.utils._pytree import tree_iter

        total, count = 0.0, 0
        for batch in batches:
            losses = self.loss(model, batch)
            sizes = {len(one) for one in tree_iter(batch) if getattr(one, "ndim", 0)}
            rows = sizes.pop() if losses.ndim == 0 and len(sizes) == 1 else losses.numel()
            total, count = total + float(losses.sum()) * rows / losses.numel(), count + rows
        return {"loss": total / max(count, 1)}

    def collate(self, items: list[Any]) -> Any:
        """Return the batch of these samples: tensors in any nesting of lists, tuples and dicts."""
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            what = f"torch's default collation cannot join these samples ({reason(error)})"
            raise BadInput(what, "define collate(self, items)") from error

    def optimizer(
        self, model: torch.nn.Module
    ) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """Return the optimizer, or several; None takes the planned AdamW."""
        del model
        return None

    def after_step(self, model: torch.nn.Module, step: int) -> None:
        """Do something after each update of the weights, such as an average of them."""

    def predict(self, model: torch.nn.Module, item: Any) -> Any:
        """Return the answer for one item of `trainfit predict`, as plain JSON values."""
        del model, item
        raise self._lacks("predict(self, model, item)")

    def _lacks(self, method: str) -> BadInput:
        """Name a missing method that the command needs."""
        name = method.partition("(")[0]
        return BadInput(f"{type(self).__name__} has no {name}", f"define {method}")

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write files that the model needs elsewhere, beside its weights."""


def is_greater_better(job: type[Job]) -> bool:
    """Tell the direction of a job's metric."""
    said = job.greater_is_better
    return not less_is_better(job.metric) if said is None else said


def less_is_better(metric: str) -> bool:
    """Tell by the words of its name whether a metric is a loss or an error."""
    words = "".join(c if c.isalpha() else " " for c in metric.lower()).split()
    return not set(_LESS_IS_BETTER.split()).isdisjoint(words)


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


# ── jobs by name ──────────────────────────────────────────────────────────────────────────────────


BUILT_IN = {
    "nli": "trainfit.jobs.nli",
    "textclass": "trainfit.jobs.textclass",
    "pairs": "trainfit.jobs.textclass",
    "tokens": "trainfit.jobs.textclass",
    "gpt": "trainfit.jobs.gpt",
}

_registered: dict[str, type[Job]] = {}


def is_own(task: str) -> bool:
    """Tell a job of the user's, `module:Class`, from a built-in one."""
    return ":" in task


def job_module(task: str) -> Any:
    """Return the module that prepares and trains a job, or raise BadInput for an unknown one."""
    if is_own(task):
        load(task)
        return import_module("trainfit.jobs.own")
    if task not in BUILT_IN:
        listed = f"the jobs are {', '.join(BUILT_IN)}, or module:Class for one of yours"
        if "." in task or "/" in task:  # a file in the place of the job
            raise BadInput(f"no job before {brief(task)!r}", f"name one first; {listed}")
        raise BadInput(f"unknown job {brief(task)!r}", did_you_mean(task, BUILT_IN, listed))
    return import_module(BUILT_IN[task])


def check_job(task: str) -> None:
    """Raise BadInput for an unknown job; a job of the user's is imported and registered."""
    if is_own(task):
        load(task)
    elif task not in BUILT_IN:
        job_module(task)


def load(task: str) -> type[Job]:
    """Import `module:Class`, from the current folder first, and register its configuration."""
    module, _, name = task.partition(":")
    if not module.replace(".", "").isidentifier() or not name.isidentifier():
        raise BadInput(f"{brief(task)!r} names no job", "give module:Class, such as my_jobs:Images")
    if module.endswith(".py"):
        raise BadInput(f"{brief(task)!r} names a file", f"write {module[:-3]}:{name}")
    found = getattr(_imported(module, task), name, None)
    if not (isinstance(found, type) and issubclass(found, Job)):
        raise BadInput(f"{module} has no trainfit.Job called {brief(name)}", "give module:Class")
    job: type[Job] = found
    if _registered.get(task) is not job:
        _register(task, job)
        _registered[task] = job
    return job


@prints_aside()
def _imported(module: str, task: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(module)
        if getattr(found.__spec__, "_initializing", False):  # each child would start the next one
            what = f"{module} calls trainfit while it is imported"
            raise BadInput(what, 'put the call under if __name__ == "__main__":')
        return found
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            fix = f"run it from the folder of {module.split('.')[0]}.py, or install the package"
            raise BadInput(f"there is no module {brief(module)!r} for {brief(task)}", fix) from None
        raise BadInput(
            f"{module} needs {error.name}, which is not installed", "install it"
        ) from None
    except (ImportError, SyntaxError) as error:
        relative = "relative import" in str(error)
        fix = "run it from the folder above the package" if relative else "fix the file"
        raise BadInput(f"cannot import {brief(module)} ({reason(error)})", fix) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, TrainfitError) or os.environ.get("TRAINFIT_TRACEBACK"):
            raise
        at = user_line(error) or "the file"
        raise BadInput(
            f"cannot import {brief(module)} ({in_one_line(error)})", f"fix {at}"
        ) from None


def _register(task: str, job: type[Job]) -> None:
    """Make the job's configuration known: its own fields under `job.`, trainfit's beside them."""
    config = config_class(job)
    if not isinstance(job.metric, str):
        raise BadInput(f"{job.__name__}.metric is {job.metric!r}", "give the name of a figure")
    _check_methods(job)
    own = {f.name: f for f in config.__dataclass_fields__.values() if f.name not in TRAINING_KEYS}
    section = make_dataclass(
        f"{job.__name__}Fields", [(f.name, f.type) for f in own.values()], frozen=True, kw_only=True
    )
    schema = make_dataclass(
        f"{job.__name__}Schema", [("job", section)], bases=(OwnConfig,), frozen=True, kw_only=True
    )
    defaults: dict[str, Any] = {"job": {name: f.default for name, f in own.items()}}
    aliases = {}
    for name in config.__dataclass_fields__:
        if name in TRAINING_KEYS:
            aliases[name] = TRAINING_KEYS[name]
            defaults[TRAINING_KEYS[name]] = config.__dataclass_fields__[name].default
    space: dict[str, Any] = {}
    for name, one in tunables(job).items():
        key = TRAINING_KEYS.get(name, f"job.{name}")
        if one.choices:
            space[key] = {"kind": "categorical", "choices": list(one.choices)}
        else:
            whole = type(one.default) is int and config.__dataclass_fields__[name].type is not float
            if whole and one.log:
                what = f"{job.__name__}.Config.{name} is a whole number, tunable with log"
                raise BadInput(what, "give choices, such as choices=(16, 32, 64)")
            kind = "log" if one.log else ("int" if whole else "uniform")
            space[key] = {"kind": kind, "low": one.low, "high": one.high}
    study = {"metric": job.metric, "space": space}
    register(task, schema, defaults=defaults, aliases=aliases, study=study)


def _check_methods(job: type[Job]) -> None:
    """Raise BadInput for a method that does not take the arguments that it will be called with."""
    for name, method in vars(Job).items():
        own = inspect.getattr_static(job, name)
        if not (inspect.isfunction(method) and inspect.isfunction(own)) or name == "_lacks":
            continue
        words = list(inspect.signature(method).parameters)
        try:
            inspect.signature(own).bind(*words)
        except TypeError:
            what = f"{job.__name__}.{name} takes {inspect.signature(own)}"
            raise BadInput(what, f"define {name}({', '.join(words)})") from None


def own_config(job: type[Job], config: Any) -> Any:
    """Return the Config instance of a job from a composed configuration."""
    kind = config_class(job)
    values = {}
    for name in kind.__dataclass_fields__:
        if name in TRAINING_KEYS:
            found = config
            for part in TRAINING_KEYS[name].split("."):
                found = getattr(found, part)
            if found == "auto":
                found = kind.__dataclass_fields__[name].default
            values[name] = found
        else:
            values[name] = getattr(config.job, name)
    return kind(**values)


def source_digest(job: type[Job]) -> str:
    """Return a digest of the module's source: an edited job gets a new plan."""
    path = inspect.getsourcefile(job)
    text = Path(path).read_bytes() if path else job.__qualname__.encode()
    return hashlib.sha256(text).hexdigest()[:32]


def direction(task: str, metric: str) -> bool | None:
    """Tell whether greater is better, where `metric` is the one that a job of the user's names."""
    job = load(task)
    return is_greater_better(job) if metric == job.metric else None


def name_of(task: str | type) -> str:
    """Return the name of a job; a class must be importable by the processes that plan it."""
    if isinstance(task, str):
        return task
    if not isinstance(task, type):
        raise BadInput(f"the job is {task!r}", "give its name, such as textclass, or its class")
    if task.__module__ == "__main__" or "<locals>" in task.__qualname__:
        raise BadInput(
            f"{task.__qualname__} is defined in the script that runs",
            "put the class into a file of its own, and import it",
        )
    return f"{task.__module__}:{task.__qualname__}"
