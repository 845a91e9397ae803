"""The search space of a study, fitted to the job: what is sampled, and where trial 0 stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna.trial import Trial

from trainfit.conf.composition import as_word
from trainfit.conf.hpo import Dimension
from trainfit.errors import BadInput

Space = dict[str, Dimension]
BATCH = "training.effective_batch_size"


def fit_space(
    space: Mapping[str, Dimension],
    values: Mapping[str, Any],
    *,
    sequences: int,
    least_steps: int,
) -> tuple[Space, list[str]]:
    """The space with the configured `values` inside it, without batches too large for the data.

    Also what was changed, in words. A default outside the range would be a trial that the sampler
    cannot place, so the range is widened to it.
    """
    fitted: Space = {}
    notes = []
    for name, one in space.items():
        if name == BATCH and one.kind == "categorical":
            one, note = _without_large(one, sequences, least_steps)
            notes += note
        if applies(one, values):
            one, note = _including(name, one, values[name])
            notes += note
        fitted[name] = one
    return fitted, notes


def _without_large(one: Dimension, sequences: int, least_steps: int) -> tuple[Dimension, list[str]]:
    smallest = min(one.choices)
    kept = tuple(c for c in one.choices if c == smallest or sequences / c >= least_steps)
    if kept == one.choices:
        return one, []
    out = ", ".join(str(c) for c in one.choices if c not in kept)
    note = f"{BATCH}: {out} left out, under {least_steps} steps in {sequences:,} sequences"
    return replace(one, choices=kept), [note]


def _including(name: str, one: Dimension, value: Any) -> tuple[Dimension, list[str]]:
    note = [f"{name}: the search includes the configured {json.dumps(value)}"]
    if one.kind == "categorical":
        if any(_same(value, choice) for choice in one.choices):
            return one, []
        return replace(one, choices=(value, *one.choices)), note
    assert one.low is not None
    assert one.high is not None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(
            f"{name} is searched from {one.low:g} to {one.high:g}, and set to {json.dumps(value)}",
            f"give {name} a number, which is trial 0",
        )
    if one.low <= value <= one.high:
        return one, []
    if one.kind == "log" and not value > 0:
        raise BadInput(
            f"{name} is searched by its logarithm, and set to {value}",
            f"give {name} a number above 0, or search it uniformly",
        )
    return replace(one, low=min(one.low, value), high=max(one.high, value)), note


def _same(one: Any, other: Any) -> bool:
    """Equal, where true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def applies(one: Dimension, values: Mapping[str, Any]) -> bool:
    """Whether a dimension is searched where the other keys have these values."""
    return all(
        any(_same(values.get(key), option) for option in options)
        for key, options in one.when.items()
    )


def suggest(trial: Trial, space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every key that is searched; those with a condition come last."""
    chosen: dict[str, Any] = {}
    for name in sorted(space, key=lambda name: bool(space[name].when)):
        if applies(space[name], {**values, **chosen}):
            chosen[name] = _suggest(trial, name, space[name])
    return chosen


def _suggest(trial: Trial, name: str, one: Dimension) -> Any:
    if one.kind == "categorical":
        return trial.suggest_categorical(name, one.choices)
    assert one.low is not None
    assert one.high is not None
    if one.kind == "int":
        return trial.suggest_int(name, int(one.low), int(one.high))
    return trial.suggest_float(name, one.low, one.high, log=one.kind == "log")


def defaults(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Trial 0: the searched keys as they are configured."""
    return {name: values[name] for name, one in space.items() if applies(one, values)}


def as_words(params: Mapping[str, Any]) -> list[str]:
    """Sampled values as words of a command."""
    return [as_word(name, value) for name, value in params.items()]
