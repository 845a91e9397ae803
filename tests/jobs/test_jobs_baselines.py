"""The baselines against what is known of the data, and that they never see what they are asked."""

from dataclasses import replace

import numpy as np
import pytest

from trainfit.data.pairs import split_corpus
from trainfit.data.synthetic import make_corpus
from trainfit.jobs.baselines import best_threshold, majority_baseline, tfidf_baseline


@pytest.fixture(scope="module")
def corpus():
    return make_corpus("small", 3)


@pytest.fixture(scope="module")
def parts(corpus):
    folds = split_corpus(corpus, seed=3)
    return folds.folds[0].train, folds.folds[0].validation


def test_always_the_same_answer_has_no_f1_and_the_accuracy_of_the_negatives(corpus, parts):
    found = majority_baseline(corpus, *parts)
    assert found.f1 == 0
    assert found.accuracy == pytest.approx(1 - corpus.labels[parts[1]].mean())


def test_always_the_same_answer_is_yes_where_most_are(corpus, parts):
    turned = replace(corpus, evidence=~corpus.evidence)
    found = majority_baseline(turned, *parts)
    assert found.recall == 1
    assert found.precision == pytest.approx(turned.labels[parts[1]].mean())


def test_a_count_of_words_beats_no_answer_but_cannot_tell_whom_a_cue_is_about(corpus, parts):
    found = tfidf_baseline(corpus, *parts)
    assert 0.4 < found.f1 < 0.8
    held = parts[1]
    assert found.count == held.size
    again = tfidf_baseline(corpus, *parts)
    assert again == found


def test_a_count_of_words_solves_what_words_alone_tell(corpus, parts):
    told = [
        [criterion in text.replace(".", "").split() for criterion in corpus.criteria]
        for text in corpus.texts
    ]
    easy = replace(corpus, evidence=np.array(told))
    assert tfidf_baseline(easy, *parts).f1 > 0.9


def test_the_labels_of_the_held_part_change_neither_choice_nor_threshold(corpus, parts):
    train, held = parts
    other = corpus.evidence.copy()
    other[np.unique(corpus.post_of[held])] ^= True
    honest = tfidf_baseline(corpus, train, held)
    turned = tfidf_baseline(replace(corpus, evidence=other), train, held)
    (tn, fp), (fn, tp) = honest.confusion
    assert turned.confusion == ((fn, tp), (tn, fp))


def test_a_criterion_without_positives_in_training_is_answered_with_no(corpus, parts):
    train, held = parts
    none = corpus.evidence.copy()
    none[np.unique(corpus.post_of[train]), 4] = False
    fifth = held[corpus.criterion_of[held] == 4]
    assert tfidf_baseline(replace(corpus, evidence=none), train, fifth).recall == 0


def test_the_threshold_is_the_best_of_all():
    labels = np.array([0, 0, 1, 0, 1, 1])
    scores = np.array([0.1, 0.2, 0.3, 0.35, 0.4, 0.9])
    threshold, f1 = best_threshold(labels, scores)
    assert 0.2 < threshold <= 0.3
    assert f1 == pytest.approx(6 / 7)
