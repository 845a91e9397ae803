"""The baselines against what is known of the data, and that they never see what they are asked."""

from dataclasses import replace

import numpy as np
import psutil
import pytest
from scipy.sparse import vstack
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.pipeline import make_pipeline

from trainfit.data.redsm5 import split_corpus
from trainfit.data.synthetic import make_corpus
from trainfit.data.tokens import from_lists
from trainfit.jobs import baselines
from trainfit.jobs.baselines import (
    in_background,
    majority_baseline,
    pair_arrays,
    tfidf_baseline,
)
from trainfit.jobs.text_baselines import best_threshold, count_tokens, text_arrays, text_baselines
from trainfit.jobs.textclass import text_datasets


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


def test_words_counted_once_give_the_scores_of_a_vectorizer_of_the_training_posts(corpus, parts):
    from sklearn.feature_extraction.text import TfidfVectorizer

    from trainfit.jobs.baselines import _weigh, count_words

    known = np.unique(corpus.post_of[parts[0]])
    for pairs in (False, True):
        found = _weigh(count_words(corpus.texts), known, pairs)
        words = TfidfVectorizer(ngram_range=(1, 1 + pairs), sublinear_tf=True)
        words.fit([corpus.texts[post] for post in known])
        np.testing.assert_array_equal(found.toarray(), words.transform(corpus.texts).toarray())


def test_texts_without_a_word_are_scored_by_how_common_the_labels_are(corpus, parts):
    empty = replace(corpus, texts=("x",) * len(corpus.texts))
    assert 0 <= tfidf_baseline(empty, *parts).f1 <= 1


@pytest.mark.soak
def test_a_child_gives_the_same_scores_and_ends_with_the_block(corpus):
    odd = replace(corpus, texts=("\ud800 odd", *corpus.texts[1:]))
    folds = [split_corpus(odd, seed=seed) for seed in (3, 4)]
    arrays = pair_arrays(odd, folds, 3)
    before = set(psutil.Process().children())
    with in_background(lambda: arrays, cores=1) as scores:
        [child] = set(psutil.Process().children()) - before
        found = scores()
    assert not child.is_running()
    seen = [np.sort(np.concatenate([f.folds[0].train, f.folds[0].validation])) for f in folds]
    each = [tfidf_baseline(odd, s, f.test, seed=3).f1 for s, f in zip(seen, folds, strict=True)]
    assert found == {"majority_f1": 0.0, "bag_of_words_f1": pytest.approx(np.mean(each))}


@pytest.mark.soak
def test_a_child_that_nobody_waits_for_ends_with_the_block(corpus):
    arrays = pair_arrays(corpus, [split_corpus(corpus, seed=3)], 3)
    before = set(psutil.Process().children())
    with in_background(lambda: arrays, cores=1):
        [child] = set(psutil.Process().children()) - before
    assert not child.is_running()


def test_what_no_child_answers_is_computed_here(monkeypatch):
    draws, labels = np.random.default_rng(0), np.arange(200) % 2
    tokens = from_lists([draws.integers(5 + 9 * one, 40, 12).tolist() for one in labels], labels)
    data = text_datasets(tokens, ("no", "yes"), folds=2, test_share=0.2, validation_share=0.2)
    each = [text_baselines(one, seed=1) for one in data]
    own = data[0]
    counts = [count_tokens(part, 50) for part in (own.train, own.validation, own.test)]
    truth = own.test.labels
    regression = make_pipeline(
        TfidfTransformer(sublinear_tf=True),
        LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000),
    )
    known = np.concatenate([own.train.labels, own.validation.labels])
    found = regression.fit(vstack(counts[:2]), known).predict(counts[2])
    assert each[0]["bag_of_words_accuracy"] == pytest.approx(accuracy_score(truth, found))
    macro = f1_score(truth, found, average="macro")
    assert each[0]["bag_of_words_macro_f1"] == pytest.approx(macro)
    assert each[0]["majority_accuracy"] == pytest.approx(0.5, abs=0.05)
    expected = {name: pytest.approx(np.mean([one[name] for one in each])) for name in each[0]}
    monkeypatch.setattr(baselines, "_MOST_BYTES", 10)
    for cores in (0, 1):
        with in_background(lambda: text_arrays(data, 1), cores=cores) as scores:
            assert scores() == expected
