"""Training data: ReDSM5 and data of its shape, text files, folds, tokens and micro-batches.

The public names are loaded when they are first used: `import trainfit.data` imports neither torch
nor transformers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "learn_tokenizer": "tokenizers",
    "load_redsm5_nli": "redsm5",
    "load_tokenizer": "tokenizers",
}
__all__ = ["learn_tokenizer", "load_redsm5_nli", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit.data' has no attribute {name!r}")
    return getattr(import_module(f"trainfit.data.{_HOMES[name]}"), name)
