"""Words of a job's command: data by position, options that stand for keys, and their completion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import click

from trainfit.core import codec
from trainfit.core.errors import BadInput, brief, did_you_mean, nearest, redact_word
from trainfit.core.files import check_output, write_output
from trainfit.core.settings import SETTINGS


class Short(NamedTuple):
    """An option that stands for a key."""

    keys: str | Mapping[str, str]
    """The key, or that of each task."""
    metavar: str
    about: str

    def key(self, task: str) -> str | None:
        """Key of a task; None where the task has none."""
        return self.keys if isinstance(self.keys, str) else self.keys.get(task)


_DATA = {
    "nli": "data.data_dir",
    "textclass": "data.train",
    "pairs": "data.train",
    "tokens": "data.train",
    "gpt": "data.data_dir",
}
SHORT: Mapping[str, Short] = {
    "data": Short(_DATA, "PATH", "The data, as the word after TASK: a file or a folder."),
    "model": Short("model.name", "NAME", "A name of the catalogue or the hub, or a folder."),
    "output": Short("runs_dir", "FOLDER", "Where the folder of the run is made."),
    "epochs": Short("training.num_epochs", "N", "Epochs of training."),
    "batch_size": Short("training.effective_batch_size", "N", "Sequences per optimizer step."),
    "lr": Short("training.learning_rate", "RATE", "The learning rate."),
}
"""Options by name; each is a word such as training.num_epochs=3."""
_TEXTS = ("data", "model", "output")
"""Options whose value is a text, also where it looks like a number or has spaces."""


class JobCommand(click.Command):
    """A command on a job; an option that it lacks is answered with the word to write."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, or raise BadInput for an unknown option."""
        words = [self.name or "", *args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            options = [name for param in self.get_params(ctx) for name in param.opts]
            fix = _meant(error.option_name, words, [name for name in options if name[:2] == "--"])
            raise BadInput(f"unknown option {brief(error.option_name)}", fix) from None


def job_options(*without: str) -> Callable[[Any], Any]:
    """Add the options of `SHORT`; the command gets their values among its OVERRIDES."""
    names = [name for name in SHORT if name not in without]

    def decorate(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(overrides: tuple[str, ...], **given: Any) -> Any:
            short = {name: given.pop(name) for name in names}
            task = given.get("task") or str(click.get_current_context().command.name)
            return function(overrides=all_words(task, overrides, short), **given)

        for name in reversed(names):
            row = SHORT[name]
            run = click.option(_option(name), metavar=row.metavar, help=row.about)(run)
        return run

    return decorate


def all_words(
    task: str, overrides: Sequence[str], short: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Key=value words, with those that the data's place and the options stand for."""
    given = [
        (f"{_option(name)} {value}", name, value)
        for name, value in short.items()
        if value is not None
    ]
    given += [(word, "data", word) for word in overrides if "=" not in word]
    words = [word for word in overrides if "=" in word]
    if not given:
        return tuple(words)
    from trainfit.jobs.registry import check_job

    check_job(task)
    for written, name, value in given:
        _add(task, words, brief(redact_word(written)), name, value)
    return tuple(words)


def _add(task: str, words: list[str], written: str, name: str, value: str) -> None:
    """Append the word that an option stands for, unless it is there."""
    from trainfit.conf.composition import as_word, key_for, keys

    key = SHORT[name].key(task)
    if key not in keys(task):
        fix = f"write key=value words; `trainfit config {task}` shows the keys"
        raise BadInput(f"{brief(task)} has no key for {written}", fix)
    assert key is not None
    word = as_word(key, value) if name in _TEXTS else f"{key}={value}"
    for other in words:
        if key_for(task, other.partition("=")[0]) == key and _value(other) != _value(word):
            both = f"{written} and {brief(redact_word(other))} set the same key {key}"
            more = "; all other words are key=value, without spaces" if name == "data" else ""
            raise BadInput(both, f"give one of them{more}")
    words.append(word)


def _value(word: str) -> str:
    return word.partition("=")[2].strip().strip("'\"")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _meant(written: str, words: Sequence[str], options: Sequence[str]) -> str:
    """Word the fix for an unknown option by the option or the key that comes nearest."""
    from trainfit.conf.composition import key_for, keys
    from trainfit.conf.schema import SCHEMAS

    name = written.lstrip("-").replace("-", "_").lower()
    if _option(name) in options:
        return f"write {_option(name)} VALUE"
    task = next((word for word in words if word in SCHEMAS), "textclass")
    key = SHORT[name].key(task) if name in SHORT else key_for(task, name)
    if key is not None:
        short = next((_option(one) for one, row in SHORT.items() if row.key(task) == key), None)
        return f"write {key}=VALUE" + (f" or {short} VALUE" if short in options else "")
    spelled = {key.split(".")[-1]: f"{key}=VALUE" for key in keys(task)}
    spelled |= {row.hf: f"{row.key}=VALUE" for row in SETTINGS if row.hf and row.key in keys(task)}
    spelled |= {option[2:].replace("-", "_"): option for option in options}
    near = [spelled[one] for one in nearest(name, spelled, 1)]
    return did_you_mean(near[0], near) if near else "write key=value words; see --help"


SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """The script that lets a shell complete trainfit's words.

    \b
    bash:  eval "$(trainfit completion bash)"   in ~/.bashrc
    zsh:   eval "$(trainfit completion zsh)"    in ~/.zshrc
    fish:  trainfit completion fish > ~/.config/fish/completions/trainfit.fish
    """  # noqa: D301 (click reads the backspace, not the two characters)
    from click.shell_completion import get_completion_class

    from trainfit.cli.main import trainfit

    script = get_completion_class(shell)
    assert script is not None  # click brings these three
    click.echo(script(trainfit, {}, "trainfit", "_TRAINFIT_COMPLETE").source())


TASKS = ("nli", "textclass", "pairs", "tokens", "gpt")


class _Task(click.types.StringParamType):
    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        del param, ctx
        return f"Give one of {', '.join(TASKS)}, or module:Class of yours"


def task_argument(**more: Any) -> Callable[[Any], Any]:
    """Argument TASK with completion."""
    return click.argument("task", type=_Task(), shell_complete=_complete_task, **more)


def _complete_task(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return _beginning(begun, TASKS)


def complete_override(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Keys that begin with `begun`; after the =, values of the key."""
    task = context.params.get("task")
    if task not in TASKS:
        return []
    key, equals, _ = begun.partition("=")
    if equals:
        return _beginning(begun, (f"{key}={value}" for value in _values(task, key)))
    before = [word for word in context.params.get("overrides") or () if word != "="]
    if before and before[-1] in _keys(task):  # bash splits key, = and value
        return _beginning(begun, _values(task, before[-1]))
    return _beginning(begun, (f"{name}=" for name in _keys(task)))


def _beginning(begun: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(begun)]


def _keys(task: str) -> tuple[str, ...]:
    from trainfit.conf.composition import GROUPS, keys

    return (*GROUPS, *keys(task))


def _values(task: str, key: str) -> list[str]:
    """Names of the presets, or the fixed values of a key."""
    from trainfit.conf.composition import GROUPS, key_type, options

    if key in GROUPS:
        return list(options(task, key))
    fixed = _words(key_type(task, key))
    return [value if isinstance(value, str) else json.dumps(value) for value in fixed]


def _words(kind: Any) -> list[Any]:
    """The fixed values of a type: choices, true and false, null."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind is type(None):
        return [None]
    if get_origin(kind) is Annotated:
        return []
    return [word for inner in get_args(kind) for word in _words(inner)]


# ── config and init ──────────────────────────────────────────────────────────────────────────────


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A YAML file of yours, as `trainfit init` writes one; key=value words win over it.",
)


def job_command(*without: str) -> Callable[[Any], click.Command]:
    """Make a command on a job: TASK, OVERRIDES, --config, and options of `SHORT` but `without`."""
    parts: tuple[Callable[[Any], Any], ...] = (
        job_options(*without),
        config_option,
        click.argument("overrides", nargs=-1, shell_complete=complete_override),
        task_argument(),
        click.command(cls=JobCommand),
    )
    return lambda function: reduce(lambda made, part: part(made), parts, function)


@job_command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a program.")
def config(task: str, overrides: tuple[str, ...], config_file: Path | None, as_json: bool) -> None:
    """The composed configuration, and where each value came from.

    TASK is nli, textclass, pairs, tokens, gpt, or module:Class of yours. OVERRIDES are key=value
    words, such as hardware=gpu_4090 training.batch_size=20, and later ones win.
    """
    from trainfit.cli.main import tell_notes
    from trainfit.conf import compose
    from trainfit.conf.starting import with_file
    from trainfit.jobs.registry import check_job
    from trainfit.reports import terminal

    if ":" in task:
        check_job(task)
    composed = compose(task, with_file(task, config_file, overrides))
    tell_notes(*composed.notes)
    if as_json:
        values = {
            key: {"value": value, "from": composed.origins[key]}
            for key, value in composed.values().items()
        }
        about = {name: getattr(composed, name) for name in ("task", "hardware", "experiment")}
        click.echo(codec.for_programs(about | {"values": values}))
        return
    console = terminal.console()
    experiment = f", experiment {composed.experiment}" if composed.experiment else ""
    console.print(f"{composed.task} with hardware {composed.hardware}{experiment}")
    console.print(terminal.config_table(composed))


@click.command()
@task_argument(default="nli")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write it; TASK.yaml otherwise."
)
def init(task: str, output: Path | None) -> None:
    """Write a commented configuration to start from.

    TASK is nli (if none is named), textclass, pairs, tokens or gpt. Nothing is overwritten. Use the
    file with `trainfit train TASK --config FILE`.
    """
    from trainfit.conf.composition import schema_of
    from trainfit.conf.starting import starting_file

    schema_of(task)
    path = check_output(output or Path(f"{task}.yaml"))
    if path.exists():
        raise BadInput(f"{path} exists", "give another name with --output")
    write_output(path, starting_file(task, str(path)))
    click.echo(str(path))
