"""`trainfit completion`: the script that lets a shell complete trainfit's words."""

from __future__ import annotations

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
