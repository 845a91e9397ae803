"""Values of a configuration: their types and ranges, and other spellings of keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from trainfit.core.codec import Length, PathName, Range
from trainfit.core.errors import BadInput, brief, did_you_mean
from trainfit.core.settings import SETTINGS

Auto = Literal["auto"]
Switch = bool | Auto
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Steps = Annotated[int, Range(1, 10**9)]
"""A count in a run, such as steps or epochs."""
MOST_SEQUENCES = 8192
Sequences = Annotated[int, Range(1, MOST_SEQUENCES)]
"""Sequences in a step; the search for the best cut takes time by their square."""
Tokens = Annotated[int, Range(1, 2**20)]
"""Tokens in a sequence."""
Workers = Annotated[int, Range(0, 1024)]
Small = Annotated[int, Range(1, 1024)]
"""Number of processes, threads or files."""
Layers = Annotated[int, Range(1, 512)]
Width = Annotated[int, Range(1, 65_536)]
Vocabulary = Annotated[int, Range(1, 2**24)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, 10)]
"""Learning rate or weight decay."""
Amount = Annotated[float, Range(0, 10**6)]
Gibibytes = Annotated[float, Range(0.1, 10**4)]
HeldOut = Annotated[float, Range(0.01, 0.5)]
Place = Annotated[str, PathName()]
Name = Annotated[str, Length(1, 500)]
Tracking = Literal["none", "tensorboard", "mlflow", "wandb"]
"""Service that numbers are sent to besides the run folder; never a text."""
Tuning = Literal["auto", "off", "force"]
"""Tuned settings. auto: those of the same job here; force: tune first, for three minutes; off."""


_SHORT = {"lr": "training.learning_rate", "epochs": "training.num_epochs"}
ALIASES: Mapping[str, str] = {
    **{alias: row.key for row in SETTINGS for alias in row.aliases},
    **{f"{room}{short}": key for short, key in _SHORT.items() for room in ("", "training.")},
}
"""Other spellings of keys, in lower case, with the key that each means."""
COMBINED: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "model.method": {
        "qlora": {"model.method": "lora", "model.quantization": "nf4"},
        "qdora": {"model.method": "dora", "model.quantization": "nf4"},
    }
}
"""Values of a key that stand for values of several keys."""

_FLAGS: Mapping[str, Mapping[bool, str]] = {
    alias: values for row in SETTINGS for alias, values in (row.flags or {}).items()
}
"""Boolean aliases by their last part, with the key's value for true and for false."""
_NAMES: Mapping[str, Mapping[str, str]] = {
    row.key: row.spellings for row in SETTINGS if row.spellings
}
"""Other names of a key's values, in lower case."""
_HALVES = ("bf16", "fp16")
_CODES, _CODE_FLAGS = ("nf4", "int8"), ("load_in_4bit", "load_in_8bit")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `key=value` as the user wrote it, with the canonical key."""

    written: str
    key: str
    value: Any
    word: str
    """The whole word, as it was written."""


def canonical_key(written: str, keys: Iterable[str]) -> str | None:
    """Canonical key of a spelling; the last part alone is enough where it means one key."""
    valid = set(keys)
    folded = written.strip().lower()
    if folded in valid:
        return folded
    if ALIASES.get(folded) in valid:
        return ALIASES[folded]
    if "." in folded:
        return None
    endings = {key for key in valid if _last_part(key) == folded}
    endings |= {key for other, key in ALIASES.items() if _last_part(other) == folded} & valid
    return endings.pop() if len(endings) == 1 else None


def canonical_value(written: str, key: str, value: Any) -> Any:
    """Value in the spelling of the canonical key; `~/` is the home folder."""
    if isinstance(value, str) and value.startswith("~/"):  # no shell expands it behind a "="
        return str(Path(value).expanduser())
    if key == "model.name" and isinstance(value, str):  # as a browser or a completion writes it
        return value.removeprefix("https://huggingface.co/").rstrip("/") or value
    flag = _FLAGS.get(_last_part(written))
    if flag is not None:
        if not isinstance(value, bool):
            raise BadInput(f"{written} is {brief(str(value))}", "use true or false")
        return flag[value]
    if key not in _NAMES or not isinstance(value, str | bool | None):
        return value
    return _NAMES[key].get(str(value).lower().removeprefix("torch."), value)


def _last_part(written: str) -> str:
    return written.lower().split(".")[-1]


def preset_meant(value: str, names: Sequence[str]) -> str:
    """Ask for the names that may have been meant; empty where none is near.

    rtx_3090 is gpu_3090, and neither rtx_5090 nor rtx_4080 is near it.
    """
    if same := [name for name in names if _core(name) == _core(value)]:
        return f"did you mean {' or '.join(same)}?"
    return did_you_mean(value, [n for n in names if _slip(_digits(value), _digits(n))])


def _core(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|rtx|gpu", "", name.lower())


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _slip(one: str, other: str) -> bool:
    """Tell if at most one digit of a number was left out or doubled."""
    short, long = sorted((one, other), key=len)
    return short == long or any(long[:at] + long[at + 1 :] == short for at in range(len(long)))


def parts_of(item: Assignment) -> list[Assignment]:
    """Assignments that one stands for: itself, or one for each of several keys."""
    parts = COMBINED.get(item.key, {}).get(str(item.value).lower())
    if parts is None:
        return [item]
    return [
        replace(item, written=item.written if key == item.key else item.word, key=key, value=value)
        for key, value in parts.items()
    ]


def settle(assignments: Iterable[Assignment]) -> tuple[dict[str, Assignment], list[BadInput]]:
    """One assignment per canonical key; two that contradict each other are a problem."""
    by_key: dict[str, dict[str, Assignment]] = {}
    for item in assignments:  # the same word twice: the last one wins, as in a shell
        by_key.setdefault(item.key, {})[item.written] = item
    chosen: dict[str, Assignment] = {}
    problems = []
    for key, items in by_key.items():
        first, *others = _weighed(list(items.values()))
        chosen[key] = others[-1] if others else first
        other = next((item for item in others if item.value != first.value), None)
        if other is not None:
            both = f"{first.word} and {other.word} set the same key {key}"
            problems.append(BadInput(both, f"give {key} once"))
    return chosen, problems


def _weighed(items: list[Assignment]) -> list[Assignment]:
    """Assignments that count: several switches may set mixed precision or quantization together.

    enable_amp turns it on and amp_dtype names the dtype; fp16=false leaves bf16 open, and so on.
    """
    named = {_last_part(item.written): item for item in items}
    if {"enable_amp", "amp_dtype"} <= named.keys() and named["enable_amp"].value == "off":
        items = [item for item in items if _last_part(item.written) != "amp_dtype"]
    if any(item.value in _CODES for item in items):  # load_in_8bit=false leaves 4 bits open
        items = [i for i in items if i.value in _CODES or i.written not in _CODE_FLAGS]
    halves = [item.value for item in items if item.value in _HALVES]
    return [item for item in items if not any(_leaves_to(item, half) for half in halves)]


def _leaves_to(item: Assignment, half: str) -> bool:
    """Tell if the item is a switch that leaves the choice to another, which chose `half`."""
    name = _last_part(item.written)
    if name == "enable_amp":
        return bool(item.value == "auto")
    denied = name.removeprefix("use_")
    return item.value == "off" and denied in _HALVES and denied != half
