"""A job of the user's own in other processes: the planner's step, the tuner's run, predictions.

A batch may be any nesting of lists, tuples, named tuples and dicts of tensors. Its shape is found
by collating a few samples. Its leaves travel between processes as a plain mapping, and the
planner's child builds batches of any size from the shapes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.conf import SCHEMAS, Composed
from trainfit.core import codec
from trainfit.core.errors import BadInput, TrainfitWarning, brief, refusing
from trainfit.core.files import prints_aside
from trainfit.core.plan_records import Plan, Precision
from trainfit.engine.loop_settings import OptimizerSettings
from trainfit.engine.optimizer import Combined, build_optimizer, check_usable
from trainfit.jobs import exports, job_plan, registry
from trainfit.jobs.probes import engine_step, one_rank
from trainfit.jobs.registry import Job
from trainfit.runtime import compile_model

COUNT = "count"
"""Leaf that says which samples of a micro-batch count; one without any has a stand-in."""
_ROWS, _WIDTH = "rows", "width"
_PROBED = 16
"""Samples whose sizes are looked at where a dataset has no `lengths`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The nesting of a batch, and the shape and dtype of each of its tensors."""

    structure: str
    """The nesting as JSON, with the number of each tensor in its place."""
    leaves: tuple[tuple[tuple[int | str, ...], str], ...]
    """Sizes and dtype; "rows" and "width" stand for the samples and for the longest of them."""
    fills: tuple[int | str, ...]
    """Value of each of the tensors; "width" for lengths."""

    def flatten(self, batch: Any, count: int) -> dict[str, Tensor]:
        """Return the tensors of a batch by name, with a flag for each sample: the first `count`."""
        counted = torch.arange(max(count, 1)) < count
        found: list[Tensor] = []
        _take_apart(batch, "", found)
        return {str(at): leaf for at, leaf in enumerate(found)} | {COUNT: counted}

    def restore(self, leaves: Mapping[str, Tensor]) -> Any:
        """Return the batch that `flatten` took apart."""
        return _put_together(_nesting(self.structure), leaves)

    def make(self, rows: int, width: int) -> dict[str, Tensor]:
        """Return a batch of `rows` samples, each as long as `width`; masks in it are all True."""
        sizes: dict[int | str, int | str] = {_ROWS: rows, _WIDTH: width}
        made = {}
        for at, ((shape, dtype), fill) in enumerate(zip(self.leaves, self.fills, strict=True)):
            size, value = [int(sizes.get(n, n)) for n in shape], int(sizes.get(fill, fill))
            made[str(at)] = torch.full(size, value, dtype=getattr(torch, dtype))
        return made | {COUNT: torch.ones(rows, dtype=torch.bool)}


def find_shape(
    collate: Callable[[list[Any]], Any], data: Any, lengths: Sequence[int]
) -> BatchShape:
    """Collate one and two samples, and a longer one, and see which sizes change."""

    def collated(*places: int) -> tuple[list[Tensor], Any]:
        found: list[Tensor] = []
        return found, _take_apart(collate([data[at] for at in places]), "", found)

    short = min(range(len(lengths)), key=lambda at: lengths[at])
    long = max(range(len(lengths)), key=lambda at: lengths[at])
    unsized = lengths[short] == lengths[long]
    if unsized:  # the samples may differ all the same
        probed = np.unique(np.linspace(0, len(lengths) - 1, _PROBED).astype(int)).tolist()
        elements = {at: sum(leaf.numel() for leaf in collated(at)[0]) for at in probed}
        short = long = max(probed, key=lambda at: elements[at])
        if len(set(elements.values())) > 1:
            collated(*probed)  # a collation that cannot pad says so here
            text = "samples differ in size, and the training data has no lengths: memory is planned"
            warnings.warn(f"{text} for the largest of {len(probed)}", TrainfitWarning, stacklevel=2)
    one, nesting = collated(short)
    two, _ = collated(short, short)
    other, _ = collated(long)
    if not unsized:
        collated(short, long)
    leaves: list[tuple[tuple[int | str, ...], str]] = []
    fills: list[int | str] = []
    if not len(one) == len(two) == len(other):
        what = f"collate gives {len(one)} tensors for one sample and {len(two)} for two"
        raise BadInput(what, "give as many for any number of samples: stack them, or pad and stack")
    for a, b, c in zip(one, two, other, strict=True):
        if a.dim() == 0:
            raise BadInput(
                "collate gives a tensor without a dimension", "give one value per sample"
            )
        sizes: list[int | str] = []
        for at, n in enumerate(a.shape):
            if b.shape[at] != n:
                sizes.append(_ROWS)
            else:
                sizes.append(_WIDTH if c.shape[at] != n else n)
        leaves.append((tuple(sizes), str(a.dtype).removeprefix("torch.")))
        least, most = _largest(a), _largest(c)
        counts = not unsized and (least, most) == (lengths[short], lengths[long])
        fills.append(_WIDTH if counts else most)
    return BatchShape(structure=json.dumps(nesting), leaves=tuple(leaves), fills=tuple(fills))


def _largest(leaf: Tensor) -> int:
    """Largest of integers or flags: a valid index, a length, True of a mask; 0 for floats."""
    if leaf.is_floating_point() or leaf.is_complex() or not leaf.numel():
        return 0
    return int(leaf.long().max())  # torch has no max of uint16


def _take_apart(value: Any, place: str, leaves: list[Tensor]) -> Any:
    """Return the nesting of a batch as JSON data; its tensors are added to `leaves`."""
    match value:
        case Tensor():
            leaves.append(value)
            return len(leaves) - 1
        case Mapping():
            pairs = value.items()
            return {"dict": [[k, _take_apart(v, f"{place}[{k!r}]", leaves)] for k, v in pairs]}
        case list() | tuple():
            items = [_take_apart(v, f"{place}[{n}]", leaves) for n, v in enumerate(value)]
            kind = type(value)
            named = f"{kind.__module__}:{kind.__qualname__}" if hasattr(kind, "_fields") else None
            return {named or ("list" if isinstance(value, list) else "tuple"): items}
    where = f" as batch{place}" if place else ""
    fix = "give tensors, in lists, tuples or dicts" + ("; leave the rest out" if place else "")
    raise BadInput(f"collate gives a {type(value).__name__}{where}", fix)


def _put_together(nesting: Any, leaves: Mapping[str, Tensor]) -> Any:
    if isinstance(nesting, int):
        return leaves[str(nesting)]
    ((kind, parts),) = nesting.items()
    if kind == "dict":
        return {key: _put_together(part, leaves) for key, part in parts}
    items = [_put_together(part, leaves) for part in parts]
    if kind == "list":
        return items
    return tuple(items) if kind == "tuple" else _named_tuple(kind)(*items)


@lru_cache(maxsize=8)
def _nesting(structure: str) -> Any:
    return json.loads(structure)


@lru_cache(maxsize=8)
def _named_tuple(kind: str) -> Any:
    module, _, name = kind.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def own_step(
    *,
    job: str,
    config: dict[str, Any],
    batch: dict[str, Any],
    rows: int,
    width: int,
    precision: Precision,
    micro_batches: int = 1,
    optimizer: Any = "adamw_fused",
    offload_optimizer: bool = False,
    device: str = "cpu",
    compile: bool = False,
    offload_activations: bool = False,
    activation_budget: float = 1.0,
    **_planned: Any,
) -> tuple[nn.Module, Callable[[nn.Module], Callable[[], object]]]:
    """Build a job's model and its optimizer step for the planner."""
    made = _job_of(job, config)
    shape = codec.decode(BatchShape, batch)

    def loss(model: nn.Module, leaves: Mapping[str, Any]) -> Tensor:
        losses = check_loss(made.loss(model, shape.restore(leaves)), made.indivisible)
        return losses.float().sum()

    def make_step(model: nn.Module) -> Callable[[], object]:
        own: Any = made.optimizer(model)
        if own is not None:
            own = check_optimizer(own, made)
        else:
            settings = OptimizerSettings(
                kind=optimizer, learning_rate=1e-5, offload=offload_optimizer
            )
            own = build_optimizer(model, settings)
        if compile and device != "cpu":
            compile_model(model, budget=activation_budget)
        step = engine_step(model, loss, own, precision, device, offload_activations)
        batches = [shape.make(rows, width)] * micro_batches
        return lambda: step(batches, float(rows))

    return check_own_model(made).train(), make_step


def _job_of(name: str, config: dict[str, Any]) -> Job:
    kind = registry.load(name)
    asked = codec.decode(SCHEMAS[name], config, "the configuration")
    return kind(registry.own_config(kind, asked))


def own_trial(
    plan: Plan, *, task: str, config: dict[str, Any], device: str = "cpu", **_more: Any
) -> Any:
    """Build the run of a plan on the job's own data, for the tuner."""
    from trainfit.jobs.own import prepare
    from trainfit.tuning.trial import Setup

    plan = one_rank(plan)
    registry.load(task)
    asked = codec.decode(SCHEMAS[task], config, "the configuration")
    composed = Composed(
        task=task, hardware="auto", experiment=None, config=asked, origins={}, notes=()
    )
    prepared = prepare(composed)
    place = torch.device(device)
    settings = replace(prepared.settings(0, plan, place, 1), metric=None)
    runtime = job_plan.runtime_settings(asked, plan)
    return Setup(prepared.task(0, plan, place), settings, runtime, more=prepared.own_optimizer)


# ── use ───────────────────────────────────────────────────────────────────────────────────────


@prints_aside()
def predict(task: str, run: Path, items: Sequence[Any]) -> list[Any]:
    """Return the job's answer for each item, with the exported model of a run."""
    from safetensors.torch import load_model

    folder = run / "export"
    if not (folder / "model.safetensors").is_file():
        raise BadInput(f"{run} has no exported model", "give a finished run of the job")
    exports.check_export(folder)
    facts = codec.read_object(folder / "job.json")
    made = _job_of(task, facts["config"])
    model = made.model()

    def of_another(why: str) -> BadInput:
        return BadInput(f"{run} has weights of another model ({why})", f"give a run of {task}")

    with refusing(of_another):
        load_model(model, str(folder / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        return [_plain(made.predict(model, item)) for item in items]


def _plain(value: Any) -> Any:
    """Turn tensors and arrays of an answer into lists and numbers, or raise BadInput."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    what = f"predict gives a {type(value).__name__}"
    raise BadInput(what, "give numbers, texts or tensors, in lists and dicts")


def check_number(name: str, value: Any) -> float:
    """Return a figure of evaluate, or raise BadInput where it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"evaluate gives {brief(str(value), 60)!r} for {name}"
        raise BadInput(what, "give a number") from None


def check_own_model(job: Job) -> nn.Module:
    """Return a new model of a job, or raise BadInput for anything else."""
    found: Any = job.model()
    if not isinstance(found, nn.Module):
        raise BadInput(
            f"{type(job).__name__}.model gives a {type(found).__name__}", "give a Module"
        )
    return found


def check_optimizer(found: Any, job: Job) -> torch.optim.Optimizer:
    """Return a job's own optimizer, or raise BadInput where the loop cannot step it."""
    name = f"{type(job).__name__}.optimizer"
    if isinstance(found, list | tuple) and found:  # one for each part of the model, as of a GAN
        return Combined(*(check_optimizer(one, job) for one in found))
    if not isinstance(found, torch.optim.Optimizer):
        raise BadInput(f"{name} gives a {type(found).__name__}", "give a torch.optim.Optimizer")
    if isinstance(found, torch.optim.LBFGS):
        raise BadInput(f"{name} gives LBFGS, which needs a closure", "give another optimizer")
    check_usable(found)
    return found


def check_loss(losses: Any, indivisible: bool) -> Tensor:
    """Return a job's losses, or raise BadInput where they are not one number per sample."""
    if not isinstance(losses, Tensor):
        raise BadInput(f"loss gives a {type(losses).__name__}", "return a tensor, one per sample")
    if losses.dim() == 0 and not indivisible:
        raise BadInput(
            "loss gives one number for the whole batch",
            'give one per sample (reduction="none"), or set indivisible = True',
        )
    if not losses.requires_grad and torch.is_grad_enabled():
        raise BadInput("loss depends on no weight", "leave out detach() and no_grad()")
    return losses


def summed(given: Any, counted: Tensor, indivisible: bool) -> Tensor:
    """Sum one loss per sample over those that count."""
    losses = check_loss(given, indivisible)
    if indivisible:
        return losses.sum() if losses.dim() == 0 else losses.mean()
    if len(losses) != len(counted):
        raise BadInput(
            f"loss gives {len(losses):,} values for {len(counted):,} samples",
            "give one per sample: the first dimension is that of the batch",
        )
    losses = losses.reshape(len(losses), -1).mean(1)
    return losses.where(counted.to(losses.device), 0.0).sum()
