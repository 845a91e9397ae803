"""Tokenised sequences as flat arrays.

A sequence is a start and a length in one long array, in memory or mapped from a file. A subset
shares that array, so folds and splits cost no tokens.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.data.tokenizers import join_pairs

if TYPE_CHECKING:
    from trainfit.data.tokenizers import Tokenizer

T = TypeVar("T")
R = TypeVar("R")
IntArray = NDArray[np.int64]
Indices = Sequence[int] | IntArray
_WORK: list[Callable[[list[Any]], Any]] = []
"""Work of this process, where it is a worker of `map_in_order`."""
_CHUNK = 1024
"""Sequences given to the tokenizer at once."""
_REPEATED = 2
"""Times that a text occurs in pairs, from which on it is tokenised once and for all."""
_IDS_ALONE: dict[str, Any] = {
    "padding": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
}
IGNORED = -100
"""Tag of a token that has none: a special one, or not the first of its word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Sequences of tokens with a label each."""

    ids: NDArray[np.int32] = field(repr=False)
    """Token ids of all sequences, and maybe of others."""
    starts: IntArray = field(repr=False)
    """Start of each sequence in `ids`."""
    lengths: IntArray = field(repr=False)
    labels: NDArray[Any] = field(repr=False)
    """Class of each sequence; a row of 0 and 1 for several labels, or a number of its own.

    With `tags`, the number of its tokens that have one."""
    types: NDArray[np.uint8] | None = field(default=None, repr=False)
    """Token types: 0 for the first text of a pair and 1 for the second; None: no types."""
    groups: IntArray | None = field(default=None, repr=False)
    """Group of each sequence, which stays together in a split, such as the post."""
    rows: IntArray | None = field(default=None, repr=False)
    """Number of each sequence's row in its file, from 1."""
    criteria: IntArray | None = field(default=None, repr=False)
    """Criterion of each sequence, for metrics by criterion."""
    tags: NDArray[np.int32] | None = field(default=None, repr=False)
    """Tag of each token in `ids`, or IGNORED; None: sequences have labels, not their words."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def truth(self) -> NDArray[Any]:
        """Labels, or the sequence and the tag of every word that has one `[words, 2]`."""
        if self.tags is None:
            return self.labels
        parts = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        flat = [self.tags[start : start + length] for start, length in parts]
        found = np.concatenate(flat) if flat else self.tags[:0]
        sequence = np.repeat(np.arange(len(self)), self.labels)
        return np.stack([sequence, found[found != IGNORED]], axis=1)

    def subset(self, indices: Indices) -> Tokens:
        """Select these sequences in this order; tokens are shared."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            labels=self.labels[chosen],
            groups=None if self.groups is None else self.groups[chosen],
            rows=None if self.rows is None else self.rows[chosen],
            criteria=None if self.criteria is None else self.criteria[chosen],
        )

    def sequence(self, index: int) -> NDArray[np.int32]:
        """Token ids of one sequence."""
        start = int(self.starts[index])
        return np.asarray(self.ids[start : start + int(self.lengths[index])])


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Train, validation and test data of a run."""

    train: Tokens
    validation: Tokens
    test: Tokens
    metadata: dict[str, Any]
    """JSON values such as counts, classes and weights; never a text."""


def from_lists(
    ids: Sequence[Sequence[int]],
    labels: Indices | NDArray[Any],
    *,
    types: Sequence[Sequence[int]] | None = None,
    groups: IntArray | None = None,
    criteria: IntArray | None = None,
) -> Tokens:
    """Make Tokens from lists."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    kinds = None if types is None else _flat(types, lengths).astype(np.uint8)
    return Tokens(
        ids=_flat(ids, lengths),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        labels=np.asarray(labels),
        types=kinds,
        groups=groups,
        criteria=criteria,
    )


def _flat(rows: Sequence[Any], lengths: IntArray) -> NDArray[np.int32]:
    if rows and isinstance(rows[0], np.ndarray):
        return np.concatenate(rows).astype(np.int32)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))


def tokenize_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    labels: Indices | NDArray[Any],
    *,
    seconds: Sequence[str] | None = None,
    max_length: int,
) -> Tokens:
    """Tokenise texts, or pairs of them with `seconds`, with special tokens, cut to `max_length`."""
    if seconds is not None:
        pairs = list(zip(texts, seconds, strict=True))
        encoded, types = encode_pairs(tokenizer, pairs, max_length)
        return from_lists(encoded, labels, types=types)
    ids: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        ids += encode_texts(tokenizer, texts[start : start + _CHUNK], max_length)
    return from_lists(ids, labels)


def tell_cut(tokens: Tokens, max_length: int) -> None:
    """Warn of texts that lose their end."""
    if full := int((tokens.lengths >= max_length).sum()):
        what = f"{full:,} of {len(tokens):,} rows have {max_length} tokens or more"
        why = "what is beyond is cut off (data.max_length of the training)"
        warnings.warn(f"{what}: {why}", TrainfitWarning, stacklevel=3)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Token ids of each text; an empty text gets one token, because packing needs one."""
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length, **_IDS_ALONE)
    ids: list[list[int]] = encoded["input_ids"]
    # A tokenizer without special tokens returns no token for an empty text.
    filler = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else 0
    return [one or [filler] for one in ids]


def encode_words(
    tokenizer: Tokenizer, rows: Sequence[Sequence[str]], max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of each row of words, and for each token the word that it begins, else -1.

    A word may begin nowhere: it is cut off, or the tokenizer makes nothing of it.
    """
    if not tokenizer.is_fast:
        what = f"{type(tokenizer).__name__} does not tell which word a token is of"
        raise BadInput(what, "choose a model with a fast tokenizer (tokenizer.json)")
    special = tokenizer.num_special_tokens_to_add()
    if max_length <= special:
        what = f"data.max_length is {max_length}, and {special} tokens are special"
        raise BadInput(what, "set it higher")
    before = "" if _adds_spaces(tokenizer) else " "
    ids: list[list[int]] = []
    places: list[list[int]] = []
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        encoded = tokenizer(
            [[first, *(before + word for word in others)] for first, *others in part],
            is_split_into_words=True,
            truncation=True,
            max_length=max_length,
            **_IDS_ALONE,
        )
        for at, found in enumerate(encoded["input_ids"]):
            of = encoded.word_ids(at)
            begun = [
                -1 if word is None or word == last else word
                for last, word in zip([None, *of], of, strict=False)
            ]
            ids.append(found or [0])
            places.append(begun or [-1])
    return ids, places


def _adds_spaces(tokenizer: Tokenizer) -> bool:
    """Tell if words given apart get the tokens that they have within a text."""
    apart = tokenizer(["a", "b"], is_split_into_words=True)["input_ids"]
    return bool(apart == tokenizer("a b")["input_ids"])


def tokenize_words(
    tokenizer: Tokenizer, rows: Sequence[Sequence[str]], tags: Sequence[Indices], *, max_length: int
) -> Tokens:
    """Tokenise words, each with the number of its tag."""
    ids, places = encode_words(tokenizer, rows, max_length)
    flat = [tag_tokens(np.asarray(one), each) for one, each in zip(tags, places, strict=True)]
    labels = [int((one != IGNORED).sum()) for one in flat]
    return replace(from_lists(ids, labels), tags=np.concatenate(flat))


def tag_tokens(tags: IntArray, places: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Give each token the tag of the word that it begins."""
    begun = np.asarray(places)
    found: NDArray[np.int32] = np.where(begun < 0, IGNORED, tags[begun]).astype(np.int32)
    return found


def map_in_order(
    items: Iterable[tuple[T, list[Any]]], work: Callable[[list[Any]], R], processes: int
) -> Iterator[tuple[T, R]]:
    """Yield each item with the result of `work` on its texts, in order.

    With several processes, `work` is sent to each once, and only a few items are in progress.
    """
    if processes == 1:
        for item, texts in items:
            yield item, work(texts)
        return
    # A fork of a process that has threads, as torch and tokenizers start them, may hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, (work,)) as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        for item, texts in items:
            waiting.append((item, pool.submit(_run, texts)))
            if len(waiting) > 2 * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        for last, future in waiting:
            yield last, future.result()


def _start(work: Callable[[list[Any]], Any]) -> None:
    _WORK[:] = [work]


def _run(texts: list[Any]) -> Any:
    return _WORK[0](texts)


def tokenize_pairs(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    seconds: Sequence[str],
    text_of: IntArray,
    second_of: IntArray,
    labels: Indices,
    *,
    max_length: int,
) -> Tokens:
    """Tokenise pairs of texts; a pair that is too long loses the end of its first text.

    Pair p is `texts[text_of[p]]` with `seconds[second_of[p]]`; the first becomes its group and the
    second its criterion.
    """
    _check_room(tokenizer, seconds, max_length)
    pairs = np.stack([text_of, second_of], axis=1)

    def encode(chosen: IntArray) -> tuple[list[list[int]], list[list[int]] | None]:
        named = [(texts[i], seconds[j]) for i, j in chosen.tolist()]
        return encode_pairs(tokenizer, named, max_length, "only_first")

    found: tuple[Any, Any] | None = None
    if _REPEATED * (len(texts) + len(seconds)) < len(pairs):
        before = "" if separates(tokenizer) else "\n"
        joined = [before + second for second in seconds]
        found = join_pairs(tokenizer, texts, joined, pairs, max_length, encode)
    ids, types = found or encode(pairs)
    return from_lists(ids, labels, types=types, groups=text_of, criteria=second_of)


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    max_length: int,
    shorten: Literal["longest_first", "only_first"] = "longest_first",
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Token ids of each pair as the model reads it, and token types where the model has them.

    A pair that is too long loses tokens of the longer text, or of its first alone.
    """
    needed = 2 + tokenizer.num_special_tokens_to_add(pair=True)
    if max_length < needed:
        what = f"data.max_length is {max_length}, and a pair of texts takes {needed} tokens or more"
        raise BadInput(what, "set it higher")
    with_types = "token_type_ids" in tokenizer.model_input_names
    before = "" if separates(tokenizer) else "\n"
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(pairs), _CHUNK):
        part = pairs[start : start + _CHUNK]
        encoded = tokenizer(
            [first for first, _ in part],
            [before + second for _, second in part],
            truncation=shorten,
            max_length=max_length,
            **_IDS_ALONE | {"return_token_type_ids": with_types},
        )
        ids += encoded["input_ids"]
        types += encoded["token_type_ids"] if with_types else []
    return ids, types if with_types else None


def separates(tokenizer: Tokenizer) -> bool:
    """Tell if the tokenizer puts a separator between two texts."""
    single, pair = (tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return bool(pair > single)


def _check_room(tokenizer: Tokenizer, seconds: Sequence[str], max_length: int) -> None:
    """Raise BadInput where a second text, which is never cut, leaves no room for the first."""
    special = tokenizer.num_special_tokens_to_add(pair=True)
    before = "" if separates(tokenizer) else "\n"
    joined = [before + text for text in seconds]
    encoded = tokenizer(joined, add_special_tokens=False, return_attention_mask=False)
    needed = special + max(len(one) for one in encoded["input_ids"])
    if needed >= max_length:
        raise BadInput(
            f"data.max_length is {max_length}, but a criterion alone takes {needed} tokens",
            f"set it to {needed + 1} or more, or shorten the criteria (data.criteria=short)",
        )
