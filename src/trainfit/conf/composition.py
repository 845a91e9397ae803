"""Compose a configuration with Hydra, check it by the schema, and record each value's origin."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.conf.aliases import (
    Assignment,
    canonical_key,
    canonical_value,
    parts_of,
    preset_meant,
    settle,
)
from trainfit.conf.schema import SCHEMAS, Config
from trainfit.core import codec
from trainfit.core.errors import BadConfig, BadInput, brief, did_you_mean, redact_word
from trainfit.core.files import is_file, read_own_yaml
from trainfit.core.libraries import has, need

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

GROUPS = ("hardware", "experiment")
OWN = "own"
"""Folder of the YAML files that jobs of the user's own share."""
_SHARED = {"pairs": "textclass", "tokens": "textclass"}
"""Task whose presets and studies another task takes."""
_LONGEST_WORD = 20_000
_URL = re.compile(r"\s*[a-z][a-z0-9+.-]*://[^,\s]*\s*$")
_PATH = re.compile(r"[^\[\]{},='\"\\$]*[/.][^\[\]{},='\"\\$]*")
"""Text that may be a path; Hydra's grammar has no ~, parentheses or foreign letters."""
_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_/][\w./-]*", re.IGNORECASE | re.ASCII)
"""Word that Hydra reads as a text, unlike a number or true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A configuration, and the layer that set each key."""

    task: str
    hardware: str
    experiment: str | None
    config: Config
    origins: dict[str, str]
    """dotted key -> default, preset NAME, experiment NAME or override"""
    notes: tuple[str, ...]
    """Notes on spellings that were taken as another key."""

    def values(self) -> dict[str, Any]:
        """Values of the configuration by dotted key."""
        return flat_values(self.config)

    def written(self) -> dict[str, Any]:
        """Content of a run's config.json."""
        names = ("task", "hardware", "experiment", "config", "origins")
        return {name: codec.encode(getattr(self, name)) for name in names}


def flat_values(config: Config) -> dict[str, Any]:
    """Values of a configuration by dotted key."""
    return dict(flatten(codec.encode(config)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnTask:
    """Configuration that the class of a user's own job declares."""

    defaults: Mapping[str, Any]
    """Defaults by dotted key; `job` holds the fields of its Config."""
    aliases: Mapping[str, str]
    study: Mapping[str, Any]
    """Fields of HpoConfig: the metric and the search space."""


_own_tasks: dict[str, _OwnTask] = {}


def register(
    task: str,
    schema: Any,
    *,
    defaults: Mapping[str, Any],
    aliases: Mapping[str, str],
    study: Mapping[str, Any],
) -> None:
    """Make the configuration of a job of the user's own known under the name `task`."""
    SCHEMAS[task] = schema
    _own_tasks[task] = _OwnTask(defaults=defaults, aliases=aliases, study=study)
    keys.cache_clear()


def study_of(task: str) -> Mapping[str, Any]:
    """Return what a job of the user's own says about its studies; nothing for a built-in one."""
    return _own_tasks[task].study if task in _own_tasks else {}


def key_for(task: str, written: str) -> str | None:
    """Return the key that a spelling means in a task's configuration; None for an unknown one."""
    aliases = _own_tasks[task].aliases if task in _own_tasks else {}
    return aliases.get(written) or canonical_key(written, keys(task))


def compose(task: str, overrides: Sequence[str] = ()) -> Composed:
    """Compose a task's configuration, or raise one error that lists every mistake."""
    schema = schema_of(task)
    groups, assignments, problems = _parse(task, overrides)
    settled, contradictions = settle(assignments)
    choices, shipped = _hydra_compose(task, tuple(f"{g}={name}" for g, name in groups.items()))
    data = deepcopy(shipped)
    for key, value in _own_tasks[task].defaults.items() if task in _own_tasks else ():
        put_value(data, key, deepcopy(value))
    for key, item in settled.items():
        put_value(data, key, item.value)
    problems += contradictions
    try:
        config = codec.decode(schema, data)
    except BadInput as error:
        problems += getattr(error, "problems", (error,))
    if problems:
        raise problems[0] if len(problems) == 1 else BadConfig(problems)
    return Composed(
        task=task,
        hardware=choices["hardware"] or "auto",
        experiment=choices["experiment"],
        config=config,
        origins=_origins(task, choices, settled),
        notes=tuple(
            f"{item.written} is {key}: took it as {key}={brief(str(item.value))}"
            for key, item in settled.items()
            if item.written != key
        ),
    )


def completed(task: str, written: Any) -> Any:
    """Configuration of an earlier version, with the defaults of keys that it did not have."""
    if not isinstance(written, dict):
        return written
    data, defaults = deepcopy(written), codec.encode(compose(task).config)
    for key in keys(task):
        *path, last = key.split(".")
        there, default = data, defaults
        for part in path:
            there, default = there.setdefault(part, {}), default[part]
            if not isinstance(there, dict):  # whoever decodes it says what is wrong
                return written
        there.setdefault(last, default[last])
    return data


def options(task: str, group: str) -> tuple[str, ...]:
    """The names that `hardware=`, `experiment=` or `hpo=` takes for a task."""
    schema_of(task)
    return tuple(sorted(path.stem for path in group_folder(task, group).glob("*.yaml")))


@cache
def keys(task: str) -> tuple[str, ...]:
    """Every dotted key of a task's configuration."""
    return tuple(name for name, _, _ in _leaves(schema_of(task)))


def schema_defaults(kind: type) -> dict[str, Any]:
    """Defaults that the schema itself gives, by dotted key; the YAML files give all others."""
    return {name: default for name, _, default in _leaves(kind) if default is not MISSING}


def key_type(task: str, key: str) -> Any:
    """The type of a dotted key, with its bounds; None for an unknown key."""
    return next((kind for name, kind, _ in _leaves(schema_of(task)) if name == key), None)


def _leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, type and default of everything that a schema lets one set."""
    for field in fields(kind):
        inner = codec.hints(kind)[field.name]
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _leaves(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", inner, field.default


def schema_of(task: str) -> type[Config]:
    """The schema of a task, or an error that names those there are."""
    if task not in SCHEMAS:
        fix = did_you_mean(task, SCHEMAS, f"the tasks are {', '.join(SCHEMAS)}")
        raise BadInput(f"unknown task {brief(task)!r}", fix)
    return SCHEMAS[task]


def task_folder(task: str) -> Path:
    """Folder of a task's YAML files."""
    return Path(str(resources.files("trainfit.conf"))) / (OWN if task in _own_tasks else task)


def group_folder(task: str, group: str) -> Path:
    """Folder of a group of a task's YAML files, which may be another task's."""
    own = task_folder(task) / group
    return own if own.is_dir() or task not in _SHARED else task_folder(_SHARED[task]) / group


def _parse(
    task: str, overrides: Sequence[str]
) -> tuple[dict[str, str], list[Assignment], list[BadInput]]:
    """Split `key=value` words into group choices and assignments, gathering all mistakes."""
    groups: dict[str, str] = {}
    assignments: list[Assignment] = []
    problems: list[BadInput] = []
    for word in overrides:
        try:
            written, value = _split(word)
            if written not in GROUPS:
                assignments += parts_of(_assignment(task, written, value, word))
            elif value is not None:  # null is the default, as `trainfit init` writes it
                groups[written] = choose(task, written, value)
        except BadInput as error:
            problems.append(error)
    return groups, assignments, problems


def parse_word(word: str) -> Override:
    """Parse a word in Hydra's grammar; sweeps are allowed, deletions and additions are not."""
    if not isinstance(word, str):
        raise BadInput(f"the override {brief(repr(word))} is no text", 'write it as "key=value"')
    shown = brief(redact_word(word))
    need(f"the word {shown!r}", "hydra")
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    data = "=" not in word and is_file(Path(word))
    such = ", data as data.train=… (gpt: data.data_dir=…)" if data else ""
    wrong = BadInput(f"cannot read the override {shown!r}", f"write it as key=value{such}")
    if "=" not in word or len(word) > _LONGEST_WORD or not codec.is_plain(word):
        raise wrong
    key, _, value = word.partition("=")
    if _URL.match(value):  # Hydra's grammar would need quotes around ?sslmode=require
        value = _written(value.strip())
    key, value = key.strip(), value.strip()  # Python's way of writing it has spaces
    for written in (value, *([_written(value)] if _PATH.fullmatch(value) else [])):
        with suppress(HydraException, ValueError, ArithmeticError, RecursionError):
            override = OverridesParser.create().parse_override(f"{key}={written}")
            if not override.is_sweep_override():
                override.value()
            if override.is_delete() or override.is_add():
                break
            return override
    quoted = " " in value and "://" not in value
    raise BadInput(wrong.what, f'write it as "{as_word(key, value)}"') if quoted else wrong


def as_word(key: str, value: Any) -> str:
    """Word that assigns `value` to `key`; `parse_word` reads it back."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    """A value in Hydra's grammar, which has other rules for quotes than JSON."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value)
        return value if plain else QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        items = (f"{_written(str(key))}:{_written(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)


def _split(word: str) -> tuple[str, Any]:
    """Key and value of a plain assignment; BadInput for a sweep, which only a study takes."""
    override = parse_word(word)
    if override.is_sweep_override():
        several = f"{brief(word)!r} gives several values"
        raise BadInput(several, "give one; `trainfit hpo` searches over several")
    return override.key_or_group, override.value()


def choose(task: str, group: str, value: Any) -> str:
    """Return the name of a preset, or raise BadInput for an unknown one."""
    names = options(task, group)
    if str(value) not in names:
        fix = preset_meant(str(value), names) or f"the choices are {', '.join(names)}"
        raise BadInput(f"unknown {group}={brief(str(value))} for {task}", fix)
    return str(value)


def _assignment(task: str, written: str, value: Any, word: str) -> Assignment:
    key = key_for(task, written)
    if key is None:
        aliases = _own_tasks[task].aliases if task in _own_tasks else {}
        known, last = [*keys(task), *aliases], written.split(".")[-1]
        listed = f"`trainfit config {task}` shows the keys"
        near = did_you_mean(written, known) or did_you_mean(last, known, listed)
        there = key_for(task, last)  # the right name in another group
        fix = near if there is None else f"did you mean {there}?"
        raise BadInput(f"unknown key {brief(written)} for {task}", fix)
    return Assignment(written, key, canonical_value(written, key, value), brief(redact_word(word)))


def hydra_files(
    folder: Path, name: str, words: Sequence[str] = ()
) -> tuple[Mapping[str, str | None], dict[str, Any]]:
    """Compose the file `name` of a folder with Hydra: the choices of its groups, and the values."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with warnings.catch_warnings():  # Hydra's own use of what newer OmegaConf versions deprecate
        warnings.filterwarnings("ignore", module=r"hydra\.")
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = hydra_compose(name, list(words), return_hydra_config=True)
    data = OmegaConf.to_container(composed)
    assert isinstance(data, dict)
    values = {str(key): value for key, value in data.items() if key != "hydra"}
    return composed.hydra.runtime.choices, values


@cache
def _hydra_compose(
    task: str, groups: tuple[str, ...]
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Merge default, hardware preset and experiment with Hydra, or alone where it is missing."""
    if not has("hydra"):
        return _plain_compose(task, dict(group.split("=") for group in groups))
    words = list(groups)
    if task in _SHARED:
        place = _written(f"file://{task_folder(_SHARED[task]).as_posix()}")
        words.append(f"hydra.searchpath=[{place}]")
    chosen, data = hydra_files(task_folder(task), "config", words)
    return {group: chosen.get(group) for group in GROUPS}, data


def _plain_compose(
    task: str, groups: dict[str, str]
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Merge the files as Hydra does, so that commands without key=value words need no Hydra."""
    data = read_own_yaml(task_folder(task) / "config.yaml")
    listed: list[dict[str, str | None]] = data.pop("defaults")[1:]
    chosen = {group: name for item in listed for group, name in item.items()}
    choices = chosen | _overridden(task, groups.get("experiment")) | groups
    for group, name in choices.items():
        for key, value in layer(task, group, name).items() if name is not None else ():
            put_value(data, key, value)
    return choices, data


def _overridden(task: str, experiment: str | None) -> dict[str, str]:
    """Groups that an experiment chooses: `- override /hardware: gpu_3090` in its defaults."""
    if experiment is None:
        return {}
    path = task_folder(task) / "experiment" / f"{experiment}.yaml"
    listed = (read_own_yaml(path) or {}).get("defaults", [])
    return {key.removeprefix("override /"): name for item in listed for key, name in item.items()}


def _origins(
    task: str, choices: Mapping[str, str | None], settled: Mapping[str, Assignment]
) -> dict[str, str]:
    origins = dict.fromkeys(keys(task), "default")
    for group, kind in zip(GROUPS, ("preset", "experiment"), strict=True):
        if name := choices[group]:
            origins |= dict.fromkeys(layer(task, group, name), f"{kind} {name}")
    return origins | dict.fromkeys(settled, "override")


@cache
def layer(task: str, group: str, name: str) -> dict[str, Any]:
    """The values that one YAML file of hardware/ or experiment/ sets, by dotted key."""
    data = read_own_yaml(group_folder(task, group) / f"{name}.yaml") or {}
    return dict(flatten({key: value for key, value in data.items() if key != "defaults"}))


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def put_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a nested mapping."""
    *path, last = key.split(".")
    for part in path:
        data = data[part]
    data[last] = value
