"""Metrics of tags agree with seqeval and scikit-learn, whatever the tags."""

from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.jobs.metrics import by_kind, has_spans, tag_intervals, tag_metrics

seqeval = pytest.importorskip("seqeval.metrics")
SCHEMES = {
    "iob": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "iobes": ["O", "B-A", "I-A", "E-A", "S-A", "B-B-C", "I-B-C", "S-B-C"],
    "bare": ["O", "B", "I", "B-X", "I-X"],
}


def arrays(true: list[list[str]], said: list[list[str]], names: list[str]) -> tuple[Any, Any]:
    numbers = {name: number for number, name in enumerate(names)}
    truth = [[row, numbers[tag]] for row, tags in enumerate(true) for tag in tags]
    return np.array(truth), np.array([numbers[tag] for tags in said for tag in tags])


@st.composite
def two_sides(draw: Any) -> tuple[list[list[str]], list[list[str]], list[str]]:
    names = draw(st.sampled_from(sorted(SCHEMES)).map(SCHEMES.get))
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    tag = st.sampled_from(names)
    sides = [[draw(st.lists(tag, min_size=n, max_size=n)) for n in sizes] for _ in range(2)]
    return sides[0], sides[1], names


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(two_sides())
def test_spans_are_those_of_seqeval(case: tuple[Any, Any, Any]):
    true, said, names = case
    truth, predicted = arrays(true, said, names)
    found = tag_metrics(truth, predicted, names)
    for name in ("precision", "recall", "f1"):
        wanted = getattr(seqeval, f"{name}_score")(true, said, zero_division=0)
        assert getattr(found, name) == pytest.approx(wanted), name
    assert found.accuracy == pytest.approx(seqeval.accuracy_score(true, said))
    each = by_kind(truth, predicted, names)
    report = seqeval.classification_report(true, said, output_dict=True, zero_division=0)
    types = {kind: row for kind, row in report.items() if " avg" not in kind}
    assert {kind: one.f1 for kind, one in each.items()} == pytest.approx(
        {kind: row["f1-score"] for kind, row in types.items()}
    )
    assert {kind: one.count for kind, one in each.items()} == {
        kind: row["support"] for kind, row in types.items()
    }
    if each:
        wanted = seqeval.f1_score(true, said, average="macro", zero_division=0)
        assert found.macro_f1 == pytest.approx(wanted)


def test_the_example_of_seqeval_and_bilou():
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    said = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    names = ["B-MISC", "B-PER", "I-MISC", "I-PER", "O"]
    truth, predicted = arrays(true, said, names)
    assert tag_metrics(truth, predicted, names).f1 == 0.5
    assert {kind: one.f1 for kind, one in by_kind(truth, predicted, names).items()} == {
        "MISC": 0.0,
        "PER": 1.0,
    }
    names = ["O", "U-A", "B-A", "I-A", "L-A"]
    truth, predicted = arrays([["U-A", "U-A", "B-A", "L-A"]], [["U-A", "O", "B-A", "L-A"]], names)
    assert tag_metrics(truth, predicted, names).recall == pytest.approx(2 / 3)


def test_tags_without_spans_are_scored_by_word():
    random = np.random.default_rng(0)
    names = ["ADJ", "NOUN", "VERB", "X"]
    assert not has_spans(names)
    truth = np.stack([np.repeat(np.arange(20), 5), random.integers(3, size=100)], 1)
    predicted = np.where(random.random(100) < 0.7, truth[:, 1], random.integers(3, size=100))
    found = tag_metrics(truth, predicted, names)
    assert found.accuracy == sklearn.metrics.accuracy_score(truth[:, 1], predicted)
    wanted = sklearn.metrics.f1_score(truth[:, 1], predicted, average="macro")
    assert found.f1 == found.macro_f1 == pytest.approx(wanted)
    table = sklearn.metrics.confusion_matrix(truth[:, 1], predicted, labels=range(4))
    assert [list(row) for row in found.confusion] == table.tolist()
    assert list(by_kind(truth, predicted, names)) == names[:3]


@pytest.mark.parametrize("names", [SCHEMES["iob"], ["A", "B", "C", "D", "E"]])
def test_intervals_are_drawn_by_sentences(names: list[str]):
    random = np.random.default_rng(1)
    sentences, length = 60, 8
    truth = np.stack(
        [np.repeat(np.arange(sentences), length), random.integers(5, size=sentences * length)], 1
    )
    wrong = np.repeat(random.random(sentences) < 0.5, length)  # a sentence is right or wrong
    predicted = np.where(wrong, random.integers(5, size=truth.shape[0]), truth[:, 1])
    values: dict[str, list[float]] = {"f1": [], "accuracy": []}
    rows = np.arange(truth.shape[0]).reshape(sentences, length)
    for _ in range(300):
        chosen = rows[random.integers(sentences, size=sentences)]
        drawn = truth[chosen.ravel()].copy()
        drawn[:, 0] = np.repeat(np.arange(sentences), length)
        scored = tag_metrics(drawn, predicted[chosen.ravel()], names)
        for name, each in values.items():
            each.append(getattr(scored, name))
    for name, (low, high) in tag_intervals(truth, predicted, names).items():
        wanted = np.quantile(values[name], [0.025, 0.975])
        assert [low, high] == pytest.approx(wanted.tolist(), abs=0.03), name
