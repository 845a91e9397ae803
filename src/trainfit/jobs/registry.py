"""The jobs by name: nli, textclass, pairs, tokens, gpt, and `module:Class` for one's own."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from dataclasses import make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from trainfit.conf.composition import register
from trainfit.conf.schema import OwnConfig
from trainfit.core.errors import (
    BadInput,
    TrainfitError,
    brief,
    did_you_mean,
    in_one_line,
    reason,
    user_line,
)
from trainfit.jobs.job import TRAINING_KEYS, Job, config_class, is_greater_better, tunables

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


def _imported(module: str, task: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            fix = f"run it from the folder of {module.split('.')[0]}.py, or install the package"
            raise BadInput(f"there is no module {brief(module)!r} for {brief(task)}", fix) from None
        raise BadInput(
            f"{module} needs {error.name}, which is not installed", "install it"
        ) from None
    except (ImportError, SyntaxError) as error:
        raise BadInput(f"cannot import {brief(module)} ({reason(error)})", "fix the file") from None
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
            whole = isinstance(one.default, int) and not isinstance(one.default, bool)
            kind = "log" if one.log else ("int" if whole else "uniform")
            space[key] = {"kind": kind, "low": one.low, "high": one.high}
    study = {"metric": job.metric, "space": space}
    register(task, schema, defaults=defaults, aliases=aliases, study=study)


def _check_methods(job: type[Job]) -> None:
    """Raise BadInput for a method that does not take what it will be called with."""
    for name, method in vars(Job).items():
        own = inspect.getattr_static(job, name)
        if name.startswith("_") or not inspect.isfunction(method) or not inspect.isfunction(own):
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
