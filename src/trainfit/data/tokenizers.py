"""Tokenizers: the model's own, or a byte-level BPE that is learned from the data.

Of pairs of few texts, each text is tokenised once, and joined with all that it occurs with.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput, brief, reason, refusing
from trainfit.core.files import read_text
from trainfit.core.libraries import import_generation
from trainfit.data.corpus import END_OF_TEXT
from trainfit.data.hub import reach
from trainfit.data.model_files import tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
    pass

NO_TOKENIZER_FIX = (
    "add its files (such as tokenizer.json), or set model.weights=random to learn one from the data"
)
_FILES = ["tokenizer*", "vocab*", "merges.txt", "*.model", "*.codes", "*.tiktoken", "tekken.json"]
"""Files of tokenizers; a folder with none of these has no tokenizer."""
_CLASSES = {"tokenizer.json": "PreTrainedTokenizerFast", "bpe.codes": "PhobertTokenizer"}
"""Tokenizer classes by file name, for when the config names a wrong class."""
_FEWEST = 10
"""Least number of tokens besides special ones in a real vocabulary."""
_SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_BYTES = 256
_LONG = re.compile(r"\S{1000}")
"""Text without a space that is longer than any token."""


def has_tokenizer(folder: Path) -> bool:
    """Look for a tokenizer's files in a folder, without loading anything."""
    return any(next(folder.glob(pattern), None) for pattern in _FILES)


_HIGHEST = 10**7
"""Highest id of a token; the largest vocabularies have some 300,000."""


def load_tokenizer(place: str, *, learned: bool = False) -> Tokenizer:
    """Load the tokenizer of a hub id or a local folder.

    AutoTokenizer follows the config. Where it finds no vocabulary, or misreads a file as another
    kind, the class is chosen by the files themselves; so is that of one that was `learned`, for
    which AutoTokenizer would take the class of some models.
    """
    import_generation()  # which AutoTokenizer's module imports
    import transformers

    on_hub = "check the name and the network, or give a local folder of the model"
    if not Path(place).is_dir():
        with refusing(lambda reason: BadInput(f"no tokenizer of {place}: {reason}", on_hub)):
            reach(place)
    files = tokenizer_files(place)
    by_file = [kind for name, kind in _CLASSES.items() if (Path(place) / name).is_file()]
    if fault := _fatal_fault(Path(place) / "tokenizer.json"):
        raise BadInput(f"no tokenizer in {place}: {fault}", NO_TOKENIZER_FIX)
    reasons = []
    for kind in by_file if learned else ("AutoTokenizer", *by_file):
        try:
            with quiet_transformers():
                tokenizer: Tokenizer = getattr(transformers, kind).from_pretrained(
                    place, trust_remote_code=False, **files
                )
            tokenizer("\u2603")  # a vocabulary without its token for unknown words fails now
        except Exception as error:  # noqa: BLE001  libraries below raise plain ones for a bad file
            reasons.append(reason(error))
            continue
        # Without a vocabulary file transformers makes a tokenizer of special tokens only.
        if len(tokenizer) - len(set(tokenizer.all_special_ids)) < _FEWEST:
            reasons.append("no file with its vocabulary")
        elif kind not in by_file and _misread(tokenizer, Path(place) / "tokenizer.json"):
            reasons.append("tokenizer.json is of another kind than the config says")
        else:
            return tokenizer
    fix = NO_TOKENIZER_FIX if Path(place).is_dir() else on_hub
    raise BadInput(f"no tokenizer in {place}: {reasons[0].rstrip('.')}", fix)


def _fatal_fault(path: Path) -> str | None:
    """Find a number at which the library would count for minutes, or a token at which it panics."""
    try:
        fields = json.loads(read_text(path))
        vocabulary = fields["model"]["vocab"]
        highest = max(vocabulary.values()) if isinstance(vocabulary, dict) else 0
        if highest > _HIGHEST:
            return f"its vocabulary has the id {highest}, and no token may be beyond {_HIGHEST:,}"
        written = fields["post_processor"]
        for template in [written, *written.get("processors", ())]:
            parts = [*template.get("single", ()), *template.get("pair", ())]
            added = [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]
            if unknown := [repr(one) for one in added if one not in template["special_tokens"]]:
                return f"its template has the unknown special token {brief(unknown[0])}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # whoever loads it says more
    return None


def _misread(tokenizer: Tokenizer, path: Path) -> bool:
    """Detect a file read as another kind: BPE read as WordPiece makes only unknown tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not path.is_file():
        return False
    try:
        kind = json.loads(read_text(path))["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(kind != type(backend.model).__name__)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings; trainfit raises errors of its own."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def learn_tokenizer(
    texts: Iterable[str], *, vocabulary: int = 8192, pad_id: int = 0, least: int = 2
) -> Tokenizer:
    """Learn a byte-level BPE tokenizer for texts and pairs; it can encode any text.

    Only pieces that occur `least` times become tokens: the vocabulary is saved with the model, and
    a rare piece may be a name. `pad_id` is the model's padding token, whose row of the embedding is
    not trained.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    special = [*_SPECIAL]
    special.insert(min(pad_id, len(special)), "[PAD]")
    # A space before the first word gives it the same token as elsewhere.
    backend = _learn(texts, vocabulary, special, least=least, space_first=True)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def learn_bpe(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = (), *, least: int = 0
) -> Backend:
    """Learn a tokenizer for GPT; the end of a text and the `special` tokens come first."""
    special = list(dict.fromkeys([END_OF_TEXT, *special]))
    fewest = _BYTES + len(special)
    if vocab_size < fewest:
        fix = f"give {fewest} or more: one for each byte and each special token"
        raise BadInput(f"a vocabulary of {vocab_size}", fix)
    return _learn(texts, vocab_size, special, least=least, space_first=False)


def _learn(
    texts: Iterable[str], size: int, special: list[str], *, least: int, space_first: bool
) -> Backend:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    unknown = "[UNK]" if "[UNK]" in special else None
    made = Tokenizer(models.BPE(unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_first)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=least,
        show_progress=False,
    )
    made.train_from_iterator(map(short_words, texts), trainer)
    return made


def short_words(text: str) -> str:
    """Put spaces into words of thousands of characters: learning time grows with their length."""
    return _LONG.sub(r"\g<0> ", text)


def load_bpe(path: Path) -> Backend:
    """Load a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except OSError as error:
        raise BadInput(f"cannot read {path} ({reason(error)})", "give a tokenizer.json") from None
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        fix = "give a tokenizer.json"
        raise BadInput(f"{path} is no tokenizer ({reason(error)})", fix) from None


def end_of_text(tokenizer: Backend) -> int | None:
    """Token that stands between documents, or None where the tokenizer has none."""
    found: int | None = tokenizer.token_to_id(END_OF_TEXT)
    return found


def pad_id(tokenizer: Tokenizer) -> int:
    """Id of the padding token; padding is masked, so any id serves a model without one."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def is_learned(tokenizer: Tokenizer) -> bool:
    """Tell a tokenizer without rules of a class of its own, such as `learn_tokenizer` makes."""
    from transformers import PreTrainedTokenizerFast

    return type(tokenizer) is PreTrainedTokenizerFast


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash a tokenizer; equal for tokenizers that make the same tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    digest.update(json.dumps(tokenizer.model_input_names).encode())
    if backend is not None:
        fields = json.loads(backend.to_str())
        # Options of the last call are kept in there, but are no property of the tokenizer.
        digest.update(json.dumps({**fields, "truncation": None, "padding": None}).encode())
        return digest.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


Ids = NDArray[np.int32]
_COMPARED = 32
"""Pairs that are also tokenised as such."""


def join_pairs(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    seconds: Sequence[str],
    pairs: NDArray[np.int64],
    max_length: int,
    encode: Callable[[NDArray[np.int64]], tuple[Any, Any]],
) -> tuple[list[Ids], list[Ids] | None] | None:
    """Token ids and token types of pairs, which are rows of a text's and a second text's number.

    A pair that is too long loses the end of its first text. `encode` tokenises pairs as the model
    reads them. Returns None where that differs for some sampled pairs or the longest.
    """
    firsts, others = (_alone(tokenizer, part, max_length) for part in (texts, seconds))
    sizes = [firsts[i].size + others[j].size for i, j in pairs.tolist()]
    longest, shortest = np.argmax(sizes), np.argmin(sizes)
    some = np.unique([*range(0, len(pairs), max(1, len(pairs) // _COMPARED)), longest])
    (whole,), kinds = encode(pairs[shortest : shortest + 1])
    i, j = pairs[shortest].tolist()
    places = _find(np.asarray(whole), firsts[i], others[j])
    if places is None:
        return None
    first, second = places
    spare = max_length - (len(whole) - firsts[i].size - others[j].size)
    insides = [(firsts[a][: spare - others[b].size], others[b]) for a, b in pairs.tolist()]

    def joined(sample: Any, parts: list[tuple[Ids, Ids]]) -> list[Ids]:
        around = np.asarray(sample, dtype=np.int32)
        before, between = around[:first], around[first + firsts[i].size : second]
        after = around[second + others[j].size :]
        return [np.concatenate([before, one, between, two, after]) for one, two in parts]

    ids, types = joined(whole, insides), None
    if kinds is not None:
        # A text's tokens are all of the type that the first of them has.
        of_first, of_second = (kinds[0][at] if at < len(whole) else 0 for at in places)
        filled = [(np.full(a.size, of_first), np.full(b.size, of_second)) for a, b in insides]
        types = joined(kinds[0], filled)
    found, found_types = encode(pairs[some])
    made = [(ids, found)] if types is None else [(ids, found), (types, found_types)]
    same = all(
        np.array_equal(rows[at], one)
        for rows, right in made
        for at, one in zip(some, right, strict=True)
    )
    return (ids, types) if same else None


def _alone(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[Ids]:
    """Token ids of texts without special tokens, and no more than a pair may have."""
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return [np.asarray(one, dtype=np.int32) for one in encoded["input_ids"]]


def _find(whole: Ids, first: Ids, second: Ids) -> tuple[int, int] | None:
    """Places of two texts in a pair; None where they are not in it."""
    spare = whole.size - first.size - second.size
    for start in range(spare + 1):
        if np.array_equal(whole[start : start + first.size], first):
            for gap in range(spare - start + 1):
                at = start + first.size + gap
                if np.array_equal(whole[at : at + second.size], second):
                    return start, at
    return None
