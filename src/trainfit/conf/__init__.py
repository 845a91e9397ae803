"""Configuration: Hydra's YAML in a folder per task, a typed schema, and the known spellings."""

from trainfit.conf.composition import Composed, compose, keys, layer, options
from trainfit.conf.schema import (
    SCHEMAS,
    Config,
    GptConfig,
    NliConfig,
    TextclassConfig,
    TextFilesConfig,
)

__all__ = [
    "SCHEMAS",
    "Composed",
    "Config",
    "GptConfig",
    "NliConfig",
    "TextFilesConfig",
    "TextclassConfig",
    "compose",
    "keys",
    "layer",
    "options",
]
