"""Folds keep groups whole, whatever the groups, and say when they cannot."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from trainfit.core.errors import BadInput
from trainfit.data.folds import Fold, Folds, check_apart, check_folds, keep_rare, make_folds, split


@settings(max_examples=25)
@given(
    groups=st.lists(st.integers(0, 30), min_size=60, max_size=120),
    folds=st.sampled_from([None, 2, 3, 5]),
    seed=st.integers(0, 2**31),
)
def test_a_group_is_on_one_side_and_everything_is_used(groups, folds, seed):
    groups = np.array(groups)
    strata = np.random.default_rng(seed).integers(0, 3, groups.size)
    if np.unique(groups).size < 12:
        return
    result = split(strata, groups, folds=folds, seed=seed)
    again = split(strata, groups, folds=folds, seed=seed)
    for fold, same in zip(result.folds, again.folds, strict=True):
        sides = [set(groups[part]) for part in (fold.train, fold.validation, result.test)]
        assert all(sides)
        assert sum(map(len, sides)) == len(set.union(*sides)) == np.unique(groups).size
        parts = np.concatenate([fold.train, fold.validation, result.test])
        assert sorted(parts.tolist()) == list(range(groups.size))
        assert fold.train.tolist() == same.train.tolist()
    assert len(result.folds) == (folds or 1)


def test_splitting_by_pair_is_refused_as_a_leak():
    groups = np.repeat(np.arange(4), 2)
    by_pair = Folds(
        test=np.array([6, 7]),
        folds=(Fold(train=np.array([0, 2, 4]), validation=np.array([1, 3, 5])),),
    )
    with pytest.raises(BadInput, match=r"3 groups are in both train of fold 1 and validation"):
        check_folds(by_pair, groups)
    check_folds(by_pair)  # by item there is no overlap, which is just what a leak looks like


def test_a_test_post_in_training_or_a_shared_validation_is_refused():
    fold = Fold(train=np.array([0, 1]), validation=np.array([2]))
    with pytest.raises(BadInput, match="train of fold 1 and test"):
        check_folds(Folds(test=np.array([1]), folds=(fold,)))
    with pytest.raises(BadInput, match="validation of fold 1 and validation of fold 2"):
        check_folds(Folds(test=np.array([5]), folds=(fold, fold)))
    check_apart({"train": np.array([1, 2]), "test": np.array([3])})


@pytest.mark.parametrize(
    ("folds", "shares", "message"),
    [
        (9, {}, "8 groups cannot be split into 9 parts"),
        (None, {"test_share": 0.05}, "10 groups cannot be split into 20 parts"),
        (None, {"test_share": 0.0}, "a share of 0.0"),
        (None, {"validation_share": 0.9}, "a share of 0.9"),
    ],
)
def test_what_cannot_be_split_is_named(folds, shares, message):
    groups = np.repeat(np.arange(10), 3)
    with pytest.raises(BadInput, match=message):
        split(np.zeros(30, dtype=np.int64), groups, folds=folds, **shares)


def test_without_groups_classes_are_spread_evenly():
    labels = np.array([0] * 80 + [1] * 20)
    result = split(labels, folds=4, seed=3)
    assert labels[result.test].mean() == 0.2
    assert [labels[fold.validation].sum() for fold in result.folds] == [4, 4, 4, 4]


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 25)), min_size=12, max_size=120),
    count=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
    grouped=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:The least populated class")
def test_folds_are_scikit_learns(items, count, seed, grouped):
    strata, groups = np.array(items, dtype=np.int64).T
    assume(np.unique(groups).size >= count)
    assume(np.bincount(strata).max() >= count)
    kind, own = (StratifiedGroupKFold, groups) if grouped else (StratifiedKFold, None)
    maker = kind(n_splits=count, shuffle=True, random_state=seed)
    expected = [(a.tolist(), b.tolist()) for a, b in maker.split(strata, strata, own)]
    assume(all(b for _, b in expected))
    every = np.arange(strata.size)
    made = make_folds(every, strata, own, folds=count, share=0.2, seed=seed)
    assert [(one.train.tolist(), one.validation.tolist()) for one in made] == expected


def test_the_only_items_of_a_class_are_kept_with_their_groups():
    strata = np.array([0, 0, 1, 2, 2, 0])
    rest, held = keep_rare(np.array([0, 3]), np.array([1, 2, 4, 5]), strata, None)
    assert (rest.tolist(), held.tolist()) == ([0, 2, 3], [1, 4, 5])
    groups = np.array([0, 1, 1, 2, 3, 3])
    rest, held = keep_rare(np.array([0, 3]), np.array([1, 2, 4, 5]), strata, groups)
    assert (rest.tolist(), held.tolist()) == ([0, 1, 2, 3], [4, 5])
    rest, held = keep_rare(np.array([0]), np.array([2]), strata, None)
    assert held.tolist() == [2]  # something must be held out
