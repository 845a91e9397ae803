"""Agreement of ranks on configuration, data and code, and of a run with its data, at its start.

Ranks that differ would train a mixture that nobody asked for, or wait for each other forever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainfit.conf import Composed
from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, brief, reason
from trainfit.core.plan_records import Plan
from trainfit.engine.distributed import World, gather
from trainfit.jobs.registry import is_own, load, source_digest


def check_ranks_agree(world: World, prepared: Any) -> None:
    """Raise BadInput on every rank where their prepared jobs differ."""
    if world.size == 1:
        return
    composed: Composed = prepared.composed
    values = {key: _value(value) for key, value in composed.values().items()}
    code = source_digest(load(composed.task)) if is_own(composed.task) else ""
    own = values | {
        "task": composed.task,
        "the data": prepared.facts()["checksum"],
        "the code": [caches.sources(), code, caches.libraries()],
    }
    said = gather(world, json.dumps(own, sort_keys=True))
    if problem := difference([json.loads(text) for text in said]):
        raise BadInput(problem, "start the same command, data and version on every machine")


def difference(said: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the first thing in which a rank differs from the first one; None where all agree."""
    for rank, other in enumerate(said):
        for name in sorted({*said[0], *other}):
            first, here = said[0].get(name), other.get(name)
            if first == here:
                continue
            if name.startswith("the "):
                return f"{name} of rank {rank} is not that of rank 0"
            shown = (brief(json.dumps(value)) for value in (first, here))
            return "ranks differ in {}: {} on rank 0, {} on rank {}".format(name, *shown, rank)
    return None


def batch_note(composed: Composed, plan: Plan) -> str | None:
    """Say that the batch of a step grows with the ranks, where the configuration has it so."""
    training = composed.config.training
    if plan.ranks == 1 or training.effective_batch_size != "auto" or training.batch_size == "auto":
        return None
    alone = plan.effective_batch_size // plan.ranks
    return (
        f"training.batch_size is per rank: {plan.ranks} ranks make steps of "
        f"{plan.effective_batch_size} sequences, where one rank makes them of {alone}; "
        f"training.effective_batch_size={alone} keeps them whatever the number of ranks"
    )


def _value(value: Any) -> Any:
    """Value of a key; a path that exists may differ between machines, since data has a checksum."""
    if isinstance(value, str) and os.sep in value and Path(value).exists():
        return "a path"
    return codec.encode(value)


def check_same_data(run: Path, prepared: Any) -> None:
    """Raise BadInput for other data than a run was started with."""
    try:
        before = codec.read_object(run / "data.json")["checksum"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot read data.json in {run} ({reason(error)})"
        raise BadInput(what, "give a run's folder") from None
    if before != prepared.facts()["checksum"]:
        raise BadInput(f"the data is not what {run} was trained on", "start a new run with it")
