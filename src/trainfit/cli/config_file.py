"""`--config FILE`, for the commands that take overrides."""

from __future__ import annotations

from pathlib import Path

import click

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A YAML file of yours, as `trainfit init` writes one; key=value words win over it.",
)
