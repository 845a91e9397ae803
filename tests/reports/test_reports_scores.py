"""Curves and intervals of predictions, against scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import write_predictions
from sklearn import metrics

from trainfit.reports.predictions import (
    Predictions,
    average_precision,
    f1_interval,
    pr_curve,
    read_predictions,
    roc_curve,
)

answers = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5001, 0.9, 1.0])), min_size=2
)


@given(answers)
def test_the_area_under_roc_is_scikit_learns(items: list[tuple[bool, float]]):
    positive = np.array([label for label, _ in items])
    scores = np.array([score for _, score in items])
    curve = roc_curve(positive, scores)
    if positive.all() or not positive.any():
        assert curve is None
        return
    assert curve is not None
    assert np.trapezoid(curve[1], curve[0]) == pytest.approx(
        metrics.roc_auc_score(positive, scores)
    )


@given(answers)
def test_average_precision_is_scikit_learns(items: list[tuple[bool, float]]):
    positive = np.array([label for label, _ in items])
    scores = np.array([score for _, score in items])
    found = average_precision(positive, scores)
    if not positive.any():
        assert found is None
        assert pr_curve(positive, scores) is None
        return
    assert found == pytest.approx(metrics.average_precision_score(positive, scores))
    precision, recall, _ = metrics.precision_recall_curve(positive, scores)
    points = set(zip(np.round(recall, 9), np.round(precision, 9), strict=True))
    curve = pr_curve(positive, scores)
    assert curve is not None
    drawn = zip(np.round(curve[0][1:], 9), np.round(curve[1][1:], 9), strict=True)
    assert set(drawn) <= points


def test_a_long_curve_is_drawn_with_few_points_and_the_same_area():
    random = np.random.default_rng(0)
    positive = random.random(50_000) < 0.2
    scores = random.normal(size=50_000) + positive
    curve = roc_curve(positive, scores)
    assert curve is not None
    assert len(curve[0]) <= 402
    area = metrics.roc_auc_score(positive, scores)
    assert np.trapezoid(curve[1], curve[0]) == pytest.approx(area, abs=2e-3)


@pytest.mark.parametrize("classes", [2, 4])
def test_predictions_are_read_and_judged_as_scikit_learn_does(tmp_path: Path, classes: int):
    write_predictions(tmp_path / "predictions.csv", classes)
    found = read_predictions(tmp_path / "predictions.csv")
    assert found is not None
    assert found.classes == classes
    value, low, high = f1_interval(found)
    kind = "binary" if classes == 2 else "macro"
    assert value == pytest.approx(metrics.f1_score(found.labels, found.predicted, average=kind))
    assert low < value < high
    assert len(list(found.by_criterion())) == (9 if classes == 2 else 0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(40):
        labels = (random.random(200) < 0.5).astype(np.int64)
        right = random.random(200) < 0.8
        said = np.where(right, labels, 1 - labels)
        chances = np.stack([1.0 - said, said.astype(float)], 1)
        items = np.arange(200)
        one = Predictions(
            np.ones(200, np.int64), items, (), np.zeros(200, np.int64), labels, chances
        )
        _, low, high = f1_interval(one)
        hits += low <= 0.8 <= high  # precision and recall are both 0.8, and so is F1
    assert hits >= 34


def test_posts_that_answer_alike_make_the_interval_wider():
    random = np.random.default_rng(2)
    labels = np.repeat(random.integers(0, 2, 60), 9)
    said = np.repeat(np.where(random.random(60) < 0.8, labels[::9], 1 - labels[::9]), 9)
    chances = np.stack([1.0 - said, said.astype(float)], 1)
    nothing = np.zeros(540, np.int64)
    by_post = Predictions(nothing, np.repeat(np.arange(60), 9), (), nothing, labels, chances)
    by_item = Predictions(nothing, np.arange(540), (), nothing, labels, chances)
    widths = [high - low for _, low, high in (f1_interval(by_post), f1_interval(by_item))]
    assert widths[0] > 2 * widths[1]


@pytest.mark.parametrize("text", ["", "fold,id\n1,2\n", "fold,id,label,score\n1,a,x,y\n", "\x00"])
def test_a_damaged_file_is_no_predictions(tmp_path: Path, text: str):
    (tmp_path / "predictions.csv").write_text(text)
    assert read_predictions(tmp_path / "predictions.csv") is None


@pytest.mark.parametrize("row", ["1,a,1,", "1,a,,0.5", "1,a,1,true"])
def test_predictions_with_missing_or_other_values_are_none(tmp_path: Path, row: str):
    (tmp_path / "predictions.csv").write_text(f"fold,id,label,score\n1,b,0,0.25\n{row}\n")
    assert read_predictions(tmp_path / "predictions.csv") is None
