"""Training data: ReDSM5 and data of its shape, text files, folds, tokens and micro-batches.

The public names are loaded when they are first used: `import trainfit.data` imports neither torch
nor scikit-learn.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.data.batches import collate_packed as collate_packed
    from trainfit.data.batches import collate_padded as collate_padded
    from trainfit.data.folds import split as split
    from trainfit.data.labelled_texts import load_text_files as load_text_files
    from trainfit.data.labelled_texts import text_datasets as text_datasets
    from trainfit.data.pairs import load_redsm5_nli as load_redsm5_nli
    from trainfit.data.pairs import nli_dataset as nli_dataset
    from trainfit.data.pairs import split_corpus as split_corpus
    from trainfit.data.pairs import tokenize_corpus as tokenize_corpus
    from trainfit.data.redsm5 import Corpus as Corpus
    from trainfit.data.redsm5 import read_redsm5 as read_redsm5
    from trainfit.data.synthetic import make_corpus as make_corpus
    from trainfit.data.synthetic import make_texts as make_texts
    from trainfit.data.text_files import Columns as Columns
    from trainfit.data.tokenizers import learn_tokenizer as learn_tokenizer
    from trainfit.data.tokenizers import load_tokenizer as load_tokenizer
    from trainfit.data.tokens import Dataset as Dataset
    from trainfit.data.tokens import Tokens as Tokens
    from trainfit.data.tokens import tokenize_texts as tokenize_texts

_HOMES = {
    "Columns": "text_files",
    "Corpus": "redsm5",
    "Dataset": "tokens",
    "Tokens": "tokens",
    "collate_packed": "batches",
    "collate_padded": "batches",
    "learn_tokenizer": "tokenizers",
    "load_redsm5_nli": "pairs",
    "load_text_files": "labelled_texts",
    "load_tokenizer": "tokenizers",
    "make_corpus": "synthetic",
    "make_texts": "synthetic",
    "nli_dataset": "pairs",
    "read_redsm5": "redsm5",
    "split": "folds",
    "split_corpus": "pairs",
    "text_datasets": "labelled_texts",
    "tokenize_corpus": "pairs",
    "tokenize_texts": "tokens",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainfit.data' has no attribute {name!r}")
    return getattr(import_module(f"trainfit.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
