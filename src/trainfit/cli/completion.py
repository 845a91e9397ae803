"""`trainfit completion`: the script that lets a shell complete trainfit's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    r"""The script that lets a shell complete trainfit's words.

    \b
    bash:  eval "$(trainfit completion bash)"   in ~/.bashrc
    zsh:   eval "$(trainfit completion zsh)"    in ~/.zshrc
    fish:  trainfit completion fish > ~/.config/fish/completions/trainfit.fish
    """
    from click.shell_completion import get_completion_class

    from trainfit.cli.main import trainfit

    script = get_completion_class(shell)
    assert script is not None  # click brings these three
    click.echo(script(trainfit, {}, "trainfit", "_TRAINFIT_COMPLETE").source())


TASKS = ("nli", "textclass", "pairs", "tokens", "gpt")


def task_argument(**more: Any) -> Callable[[Any], Any]:
    """Argument TASK with completion."""
    return click.argument("task", shell_complete=complete_task, **more)


def overrides_argument() -> Callable[[Any], Any]:
    """Argument OVERRIDES with completion by the keys of the task."""
    return click.argument("overrides", nargs=-1, shell_complete=complete_override)


def complete_task(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Tasks that begin with `begun`."""
    return _beginning(begun, TASKS)


def complete_override(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Keys that begin with `begun`; after the =, values of the key."""
    task = context.params.get("task")
    if task not in TASKS:
        return []
    key, equals, _ = begun.partition("=")
    if equals:
        return _beginning(begun, (f"{key}={value}" for value in _values(task, key)))
    if (key := _split_off(context)) in _keys(task):
        return _beginning(begun, _values(task, key))
    return _beginning(begun, (f"{name}=" for name in _keys(task)))


def _split_off(context: click.Context) -> str:
    """Key before the word, since bash splits key, = and value."""
    words = [word for word in context.params.get("overrides") or () if word != "="]
    return words[-1] if words else ""


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
    return [_shown(value) for value in _words(key_type(task, key))]


def _words(kind: Any) -> list[Any]:
    """The fixed values of a type: choices, true and false, null."""
    from typing import Annotated, Literal, get_args, get_origin

    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    if kind is type(None):
        return [None]
    if get_origin(kind) is Annotated:
        return []
    return [word for inner in get_args(kind) for word in _words(inner)]


def _shown(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
