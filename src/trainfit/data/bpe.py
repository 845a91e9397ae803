"""A byte-level BPE of a corpus: every text has tokens, and they turn back into the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.core.errors import BadInput, reason
from trainfit.core.files import checksum, read_text
from trainfit.data.corpus import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTES = 256
_LONG = re.compile(r"\S{1000}")
"""Text without a space that no token will be as long as."""


def learn_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Learn so many tokens, of which the end of a text and the `special` ones come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys([END_OF_TEXT, *special]))
    least = _BYTES + len(special)
    if vocab_size < least:
        raise BadInput(
            f"a vocabulary of {vocab_size}",
            f"give {least} or more: one for each byte and each special token",
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(map(short_words, texts), trainer)
    return made


def short_words(text: str) -> str:
    """Cut words of thousands of characters: learning takes time by the length of a word."""
    return _LONG.sub(r"\g<0> ", text)


def load_bpe(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "give a tokenizer.json") from None
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        raise BadInput(
            f"{path} is no tokenizer ({reason(error)})", "give a tokenizer.json"
        ) from None


def file_hash(path: Path) -> str:
    """SHA-256 of a tokenizer's file: tokens belong to it and to no other."""
    return checksum(path)


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The token that stands between documents, if the tokenizer has one."""
    found: int | None = tokenizer.token_to_id(END_OF_TEXT)
    return found
