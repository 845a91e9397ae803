"""Metrics of a tag per word: F1 of spans as seqeval counts them, else of the tags themselves.

Tags with B- and I- mark spans, in any of the usual schemes (IOB1, IOB2, IOBES, BILOU). A span is
found if its type and both ends are right. As by seqeval's default, it may also begin with I-.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfit.jobs.metrics import IntArray, Metrics, class_table, ratio

_SPELLINGS = {"L": "E", "U": "S", "M": "I"}
"""Letters of BILOU and BMES, as those of IOBES."""
_DRAWS = 1000
_GROUPS = 2000
"""Random groups in which very many sentences are resampled; their spread is the same."""


class _Counted(NamedTuple):
    """Sentence and kind `[n, 2]` of what is right, what was predicted and what is true."""

    hits: IntArray
    said: IntArray
    there: IntArray
    kinds: list[str]
    """Types of spans, or the tags."""

    def by_kind(self) -> list[IntArray]:
        """Count hits, predictions and true spans of each kind."""
        every = (self.hits, self.said, self.there)
        return [np.bincount(part[:, 1], minlength=len(self.kinds)) for part in every]


def has_spans(names: Sequence[str]) -> bool:
    """Tell tags of spans from others, such as parts of speech."""
    return any(name.startswith(("B-", "I-")) for name in names)


def tag_metrics(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> Metrics:
    """Metrics of the words' predicted tags; `truth` has the sentence and the tag of each.

    Precision, recall and F1 are those of all spans (micro), or the mean over the tags.
    """
    tags = truth[:, 1]
    counted = _count(truth, predicted, names)
    hits, said, there = counted.by_kind()
    seen = said + there > 0
    each = [ratio(hits, said), ratio(hits, there), ratio(2 * hits, said + there)]
    macro = [float(one[seen].mean()) if seen.any() else 0.0 for one in each]
    found = macro
    if has_spans(names):
        right, given, wanted = hits.sum(), said.sum(), there.sum()
        pairs = ((right, given), (right, wanted), (2 * right, given + wanted))
        found = [float(ratio(part, whole)) for part, whole in pairs]
    return Metrics(
        count=len(tags),
        accuracy=float((tags == predicted).mean()),
        precision=found[0],
        recall=found[1],
        f1=found[2],
        macro_f1=macro[2],
        auc=None,
        confusion=() if has_spans(names) else class_table(tags, predicted, len(names)),
    )


def by_kind(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> dict[str, Metrics]:
    """Metrics of each type of span, or of each tag, as counts of right, wrong and missed ones."""
    counted = _count(truth, predicted, names)
    scored = {}
    for kind, *counts in zip(counted.kinds, *counted.by_kind(), strict=True):
        hits, said, there = map(int, counts)
        if not said + there:
            continue
        f1 = float(ratio(2 * hits, said + there))
        scored[kind] = Metrics(
            count=there,
            accuracy=float(ratio(hits, said + there - hits)),
            precision=float(ratio(hits, said)),
            recall=float(ratio(hits, there)),
            f1=f1,
            macro_f1=f1,
            auc=None,
            confusion=((0, said - hits), (there - hits, hits)),
        )
    return scored


def tag_intervals(
    truth: IntArray, predicted: IntArray, names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """95% bootstrap intervals over sentences of the F1 and of the words' accuracy."""
    random = np.random.default_rng(0)
    counted = _count(truth, predicted, names)
    sentences = int(truth[:, 0].max()) + 1
    group = random.permutation(sentences) % _GROUPS
    groups, kinds = int(group.max()) + 1, len(counted.kinds)
    draws = random.multinomial(groups, np.full(groups, 1 / groups), size=_DRAWS)

    def drawn(part: IntArray) -> NDArray[np.int64]:
        places = group[part[:, 0]] * kinds + part[:, 1]
        table = np.bincount(places, minlength=groups * kinds).reshape(groups, kinds)
        found: NDArray[np.int64] = draws @ table
        return found.sum(1, keepdims=True) if has_spans(names) else found

    hits, both = drawn(counted.hits), drawn(counted.said) + drawn(counted.there)
    seen = np.maximum((both > 0).sum(1), 1)
    right = (truth[:, 1] == predicted).astype(np.float64)
    words = [np.bincount(group[truth[:, 0]], each, groups) for each in (right, np.ones_like(right))]
    values = {
        "f1": ratio(2 * hits, both).sum(1) / seen,
        "accuracy": (draws @ words[0]) / np.maximum(draws @ words[1], 1),
    }
    ends = {name: np.quantile(each, [0.025, 0.975]).tolist() for name, each in values.items()}
    return {name: (low, high) for name, (low, high) in ends.items()}


def _count(truth: IntArray, predicted: IntArray, names: Sequence[str]) -> _Counted:
    sentence, tags = truth.T
    if not has_spans(names):
        said = np.stack([sentence, predicted], 1)
        return _Counted(truth[tags == predicted], said, truth, list(names))
    there, said = (find_spans(sentence, each, names) for each in (tags, predicted))
    rows, times = np.unique(np.concatenate([there, said]), axis=0, return_counts=True)
    hits = rows[times == 2]
    return _Counted(hits[:, :2], said[:, :2], there[:, :2], list(dict.fromkeys(_types(names))))


def _types(names: Sequence[str]) -> list[str]:
    """Type of span of each tag; _ for none."""
    return [name[1:].split("-", 1)[-1] or "_" for name in names]


def find_spans(sentence: IntArray, tags: IntArray, names: Sequence[str]) -> IntArray:
    """Find the spans `[spans, 4]`: sentence, type, first word and the word after the last.

    Types are numbered in the order of the tags' names. An O is put after each sentence, so that
    words are counted with one more per sentence before them.
    """
    number = {kind: place for place, kind in enumerate(dict.fromkeys(_types(names)))}
    types = np.array([number[kind] for kind in _types(names)])
    nothing = number.get("_", -1)
    letters = np.array([ord(_SPELLINGS.get(name[0], name[0])) for name in names])
    ends = np.append(np.flatnonzero(np.diff(sentence)) + 1, sentence.size)
    owner = np.insert(sentence, ends, sentence[ends - 1])
    now, kind = np.insert(letters[tags], ends, ord("O")), np.insert(types[tags], ends, nothing)
    before, kind_before = np.append(ord("O"), now[:-1]), np.append(nothing, kind[:-1])

    def among(values: IntArray, chosen: str) -> NDArray[np.bool_]:
        return np.isin(values, [ord(letter) for letter in chosen])

    changes = kind != kind_before
    begins = among(now, "BS") | (among(before, "ESO") & among(now, "EI"))
    begins |= ~among(now, "O.") & changes
    closes = among(before, "ES") | (among(before, "BI") & among(now, "BSO"))
    closes |= ~among(before, "O.") & changes
    starts, stops = np.flatnonzero(begins), np.flatnonzero(closes)
    first = starts[np.searchsorted(starts, stops) - 1]
    found = np.stack([owner[stops - 1], kind[stops - 1], first, stops], 1)
    return np.unique(found, axis=0)
