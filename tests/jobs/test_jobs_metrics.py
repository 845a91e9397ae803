"""Every figure against scikit-learn and scipy, and what happens where a figure does not exist."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as reference

from trainfit.core.errors import BadInput
from trainfit.jobs.metrics import (
    NumberMetrics,
    binary_metrics,
    by_group,
    class_metrics,
    rank_auc,
)
from trainfit.jobs.scores import RANGES, over_folds, spread

pairs = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.5, 0.7, 1.0])),
    min_size=1,
    max_size=40,
)


@given(pairs, st.sampled_from([0.2, 0.5, 0.9]))
def test_binary_figures_are_scikit_learns(data, threshold):
    labels, scores = (np.array(column) for column in zip(*data, strict=True))
    found = binary_metrics(labels, scores, threshold)
    predicted = scores >= threshold
    assert found.count == len(data)
    assert found.accuracy == pytest.approx(reference.accuracy_score(labels, predicted))
    options = {"zero_division": 0}
    assert found.precision == pytest.approx(reference.precision_score(labels, predicted, **options))
    assert found.recall == pytest.approx(reference.recall_score(labels, predicted, **options))
    assert found.f1 == pytest.approx(reference.f1_score(labels, predicted, **options))
    assert found.macro_f1 == pytest.approx(
        reference.f1_score(labels, predicted, average="macro", **options)
    )
    table = reference.confusion_matrix(labels, predicted, labels=[0, 1])
    assert found.confusion == tuple(map(tuple, table.tolist()))
    if labels.min() == labels.max():
        assert found.auc is None
        assert "auc" not in found.scalars()
    else:
        assert found.auc == pytest.approx(reference.roc_auc_score(labels, scores))
        assert found.scalars()["auc"] == found.auc


@given(st.integers(0, 2**31), st.integers(3, 5), st.integers(12, 50))
def test_figures_of_several_classes_are_scikit_learns(seed, classes, count):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    probabilities = random.dirichlet(np.ones(classes), count)
    found = class_metrics(labels, probabilities)
    predicted = probabilities.argmax(1)
    options = {"average": "macro", "zero_division": 0}
    assert found.accuracy == pytest.approx((labels == predicted).mean())
    assert found.precision == pytest.approx(reference.precision_score(labels, predicted, **options))
    assert found.recall == pytest.approx(reference.recall_score(labels, predicted, **options))
    assert found.f1 == found.macro_f1
    assert found.f1 == pytest.approx(reference.f1_score(labels, predicted, **options))
    if np.unique(labels).size == classes:
        expected = reference.roc_auc_score(labels, probabilities, multi_class="ovr")
        assert found.auc == pytest.approx(expected)
    else:
        assert found.auc is None


def test_two_classes_are_binary_however_they_come():
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 30), random.random(30)
    both = np.stack([1 - scores, scores], 1)
    assert class_metrics(labels, both) == binary_metrics(labels, scores)


def test_figures_by_criterion_are_those_of_its_items():
    labels = np.array([1, 0, 1, 0, 0])
    scores = np.array([0.9, 0.8, 0.1, 0.2, 0.3])
    groups = np.array([0, 0, 2, 2, 2])
    found = by_group(labels, scores, groups, ["A.1", "A.2", "A.3"])
    assert list(found) == ["A.1", "A.3"]
    assert found["A.1"].f1 == pytest.approx(2 / 3)
    assert found["A.3"].f1 == 0
    assert found["A.3"].auc == 0


def test_ties_count_half():
    assert rank_auc(np.array([0, 1]), np.array([0.5, 0.5])) == 0.5


def test_no_predictions_are_an_error_and_not_a_score():
    with pytest.raises(BadInput, match="metrics of no predictions"):
        binary_metrics(np.array([], dtype=np.int64), np.array([]))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_the_spread_over_folds_is_students(values):
    found = spread(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    if np.std(values) > 1e-9:
        low, high = stats.t.interval(
            0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
        )
        assert (found.low, found.high) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("f1", (0.91, 1.0, 1.0), (None, 1)),  # Student's own upper end is 1.099
        ("auc", (0.0, 0.1, 0.0), (0, None)),
        ("accuracy", (0.0, 1.0), (0, 1)),
        ("rmse", (0.1, 3.0), (0, None)),
        ("spearman", (-0.9, 0.95), (-1, 1)),
        ("pearson", (-0.1, 0.0), (None, None)),
        ("score of a job of one's own", (0.1, 3.0), (None, None)),
    ],
)
def test_an_interval_ends_where_the_range_of_its_metric_does(name, values, ends):
    found = over_folds([{name: value} for value in values])[name]
    whole = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    expected = [free if end is None else end for end, free in zip(ends, whole, strict=True)]
    assert [found.low, found.high] == pytest.approx(expected)


def test_every_metric_over_folds_has_a_range():
    numbers = set(NumberMetrics.__slots__) - {"count"}
    classes = binary_metrics(np.array([0, 1]), np.array([0.1, 0.9])).scalars()
    assert set(RANGES) == numbers | set(classes)


def test_a_figure_that_a_fold_lacks_is_averaged_over_the_others():
    found = over_folds([{"f1": 0.5, "auc": 0.8}, {"f1": 0.7}])
    assert found["f1"].mean == pytest.approx(0.6)
    assert (found["auc"].mean, found["auc"].std) == (0.8, None)
