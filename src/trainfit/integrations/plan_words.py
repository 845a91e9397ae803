"""A plan as overrides that pin it for `trainfit train`, and as a command line for a shell."""

from __future__ import annotations

import re
import shlex
from typing import Any

from trainfit.conf import Composed, keys
from trainfit.core.plan_records import Plan
from trainfit.core.settings import chosen_by
from trainfit.jobs.gpt_plan import stream_is_half

# A word that Hydra reads as a text, unlike a number or true.
_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_/][\w./-]*", re.IGNORECASE | re.ASCII)


def overrides(plan: Plan, composed: Composed) -> list[str]:
    """Overrides that compose to the same configuration with every planned setting pinned."""
    pinned = pins(plan, composed)
    chosen = {
        key: value
        for key, value in composed.values().items()
        if composed.origins[key] == "override" and key not in pinned
    }
    groups = {"hardware": composed.hardware}
    if composed.experiment is not None:
        groups["experiment"] = composed.experiment
    return [f"{key}={_spelled(value)}" for key, value in {**groups, **chosen, **pinned}.items()]


def pins(plan: Plan, composed: Composed) -> dict[str, Any]:
    """Planned settings by key; those that a configuration cannot express are left out."""
    method = plan.workload.method
    rows = chosen_by("planner", "tune", "tuned")
    values = {row.key: row.to_configuration(row.of(plan)) for row in rows}
    values |= {
        "device.use_cuda": True if plan.gpu is not None else None,
        "model.method": None if method == "frozen" else method,
        "model.freeze_encoder": method == "frozen",
        "model.half_stream": _half_stream(plan),
    }
    known = keys(composed.task)
    return {key: value for key, value in values.items() if value is not None and key in known}


def _half_stream(plan: Plan) -> bool | None:
    """Decision of a GPT plan on half precision between blocks; None in plans of other models."""
    asked = plan.task.arguments.get("half_stream")
    return None if asked is None else stream_is_half(asked, plan.precision)


def command_line(plan: Plan, composed: Composed) -> str:
    """Environment variables and the command, quoted for a POSIX shell."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _variables(plan).items()]
    start = ["trainfit"]
    if plan.ranks > 1:
        start = ["torchrun", "--standalone", "--nproc-per-node", str(plan.ranks), "-m", "trainfit"]
    words = [*start, "train", composed.task]
    parts = [shlex.join(words), *(shlex.quote(word) for word in overrides(plan, composed))]
    return "\n".join([*lines, " \\\n    ".join(parts)])


def _variables(plan: Plan) -> dict[str, str]:
    """Environment variables that torch and CUDA read once, when they start."""
    runtime = plan.runtime
    variables = {}
    if runtime.expandable_segments is not None:
        variables["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{runtime.expandable_segments}"
    if runtime.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if runtime.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(runtime.num_threads)
    return variables


def _spelled(value: Any) -> str:
    """Value in Hydra's grammar, quoted where a bare word would mean something else."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else QuotedString(value, Quote.single).with_quotes()
