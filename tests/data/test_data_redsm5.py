"""Labels, pairs and splits of ReDSM5's shape, and every mistake in the files."""

import csv
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from job_tiny import write_redsm5
from trainfit.core.errors import BadInput
from trainfit.data.redsm5 import (
    ANNOTATIONS,
    CRITERIA,
    POSTS,
    load_redsm5_nli,
    nli_dataset,
    read_redsm5,
    sample_negatives,
    split_corpus,
    tokenize_corpus,
)
from trainfit.data.synthetic import Scale, make_corpus, make_drafts
from trainfit.data.tokenizers import learn_tokenizer

SECRET = "nobody may read this"


def put(
    folder: Path,
    posts: list[tuple[str, ...]],
    marks: list[tuple[str, ...]],
    *,
    posts_header: tuple[str, ...] = ("post_id", "text"),
    symptom: str = "DSM5_symptom",
) -> Path:
    header = ("post_id", "sentence_id", "sentence_text", symptom, "status", "explanation")
    for name, first, rows in ((POSTS, posts_header, posts), (ANNOTATIONS, header, marks)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([first, *rows])
    return folder


def write_files(folder: Path, scale: Scale, seed: int) -> None:
    """The synthetic corpus of a seed as files."""
    folder.mkdir(exist_ok=True)
    drafts = list(make_drafts(scale, seed))
    marks = [
        (d.id, f"{d.id}_{m.sentence}", d.sentences[m.sentence], m.symptom, str(int(m.status)), "")
        for d in drafts
        for m in d.marks
    ]
    put(folder, [(draft.id, " ".join(draft.sentences)) for draft in drafts], marks)


def mark(post: str, symptom: str, status: str, sentence: int = 0) -> tuple[str, ...]:
    return (post, f"{post}_{sentence}", SECRET, symptom, status, SECRET)


TWO = [("s_1_1", SECRET), ("s_2_7", f"{SECRET}, with a comma\nand a line")]


@pytest.mark.parametrize("symptom", ["DSM5_symptom", "symptom_label"])
def test_status_zero_is_no_evidence_and_does_not_erase_a_one(tmp_path: Path, symptom: str):
    marks = [
        mark("s_1_1", "ANHEDONIA", "1"),
        mark("s_1_1", "ANHEDONIA", "0", 3),
        mark("s_1_1", "FATIGUE", "0"),
        mark("s_2_7", "FATIGUE", "0"),
        mark("s_2_7", "FATIGUE", "1.0", 2),
        mark("s_2_7", "SPECIAL_CASE", "1", 3),
    ]
    corpus = read_redsm5(put(tmp_path, TWO, marks, symptom=symptom))
    names = [criterion.symptom for criterion in CRITERIA]
    found = {(corpus.ids[p], names[k]) for p, k in np.argwhere(corpus.evidence)}
    assert found == {("s_1_1", "ANHEDONIA"), ("s_2_7", "FATIGUE")}


def test_every_post_makes_nine_pairs_however_often_it_is_annotated(tmp_path: Path):
    marks = [mark("s_1_1", "ANHEDONIA", "1", n) for n in range(5)]
    corpus = read_redsm5(put(tmp_path, TWO, marks))
    assert corpus.labels.sum() == 1
    pairs = list(zip(corpus.post_of.tolist(), corpus.criterion_of.tolist(), strict=True))
    assert pairs == [(p, k) for p in range(2) for k in range(9)]
    assert corpus.labels[pairs.index((0, 1))] == 1


@pytest.mark.parametrize(
    ("posts", "marks", "header", "said"),
    [
        ([("s_1_1", "")], [], ("post_id", "text"), [POSTS, "row 1", "s_1_1", "text"]),
        ([*TWO, ("s_1_1", "x")], [], ("post_id", "text"), [POSTS, "row 3", "s_1_1", "row 1"]),
        ([("", SECRET)], [], ("post_id", "text"), [POSTS, "row 1", "post_id"]),
        ([], [], ("post_id", "text"), [POSTS, "no posts"]),
        ([("a", "b", "c")], [], ("post_id", "text"), [POSTS, "row 1", "3 fields"]),
        (TWO, [], ("post_id", "body"), [POSTS, "no column text"]),
        (TWO, [], ("s_1_1", SECRET), [POSTS, "no column post_id"]),
        (TWO, [mark("s_1_1", "SADNESS", "1")], None, [ANNOTATIONS, "row 1", "s_1_1", "SADNESS"]),
        (TWO, [mark("s_1_1", SECRET, "1")], None, [ANNOTATIONS, "row 1", "unknown symptom"]),
        (TWO, [mark("s_1_1", "FATIGUE", "2")], None, [ANNOTATIONS, "row 1", "status 2"]),
        (TWO, [mark("s_1_1", "FATIGUE", SECRET)], None, [ANNOTATIONS, "row 1", "status"]),
        (TWO, [mark("s_3_3", "FATIGUE", "1")], None, [ANNOTATIONS, "row 1", "s_3_3", POSTS]),
        (TWO, [mark(SECRET, "FATIGUE", "1")], None, [ANNOTATIONS, "row 1", "not an id"]),
    ],
)
def test_a_mistake_in_the_files_is_one_line_that_says_where_and_quotes_no_post(
    tmp_path: Path, posts, marks, header, said
):
    put(tmp_path, posts, marks, posts_header=header or ("post_id", "text"))
    with pytest.raises(BadInput) as caught:
        read_redsm5(tmp_path)
    message = str(caught.value)
    assert all(word in message for word in said), message
    assert len(message.splitlines()) == 1
    assert "nobody" not in message


@pytest.mark.parametrize("name", [POSTS, ANNOTATIONS])
def test_a_missing_file_or_column_is_named(tmp_path: Path, name: str):
    put(tmp_path, TWO, [], symptom="symptom")
    with pytest.raises(BadInput, match="no column DSM5_symptom or symptom_label"):
        read_redsm5(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(BadInput, match=f"no {name} in"):
        read_redsm5(tmp_path)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path):
    put(tmp_path, TWO, [])
    (tmp_path / POSTS).write_bytes(b"post_id,text\ns_1_1,\x81\x8d\n")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_redsm5(tmp_path)


def test_a_corpus_and_its_posts_do_not_print_their_text(tmp_path: Path):
    corpus = read_redsm5(put(tmp_path, TWO, []))
    assert SECRET not in repr(corpus)
    assert SECRET in corpus.texts


def test_the_full_made_up_data_has_the_published_counts(tmp_path: Path):
    write_files(tmp_path, "full", seed=3)
    corpus = read_redsm5(tmp_path, "full")
    published = [328, 124, 44, 102, 35, 124, 311, 59, 165]
    words = [len(text.split()) for text in corpus.texts]
    assert corpus.labels.size == 1484 * 9 == 13_356
    assert corpus.evidence.sum(0).tolist() == published
    assert int((~corpus.evidence.any(1)).sum()) == 392
    assert (min(words), max(words), round(np.mean(words), 1)) == (2, 6990, 294.7)
    rows = list(csv.DictReader((tmp_path / ANNOTATIONS).open()))
    assert sum(row["DSM5_symptom"] == "SPECIAL_CASE" for row in rows) == 92
    both = {(row["post_id"], row["DSM5_symptom"]) for row in rows if row["status"] == "0"} & {
        (row["post_id"], row["DSM5_symptom"]) for row in rows if row["status"] == "1"
    }
    assert both  # so that any() matters
    sentence = rows[0]
    text = dict(zip(corpus.ids, corpus.texts, strict=True))[sentence["post_id"]]
    assert sentence["sentence_text"] in text
    assert sentence["sentence_id"].startswith(sentence["post_id"] + "_")


def test_made_up_data_is_the_same_for_a_seed_and_as_files(tmp_path: Path):
    one, again, other = (make_corpus("small", seed) for seed in (4, 4, 5))
    assert one.texts == again.texts
    assert one.texts != other.texts
    write_files(tmp_path, "small", 4)
    read = read_redsm5(tmp_path)
    assert read.texts == one.texts
    assert (read.evidence == one.evidence).all()


@pytest.fixture(scope="module")
def corpus():
    return make_corpus("small", 1)


def test_no_post_is_in_two_parts_and_every_criterion_is_in_each(corpus):
    folds = split_corpus(corpus, folds=5, seed=2)
    every = set(range(1000))
    tested = set(corpus.post_of[folds.test].tolist())
    held = []
    for fold in folds.folds:
        train, validation = (
            set(corpus.post_of[part].tolist()) for part in (fold.train, fold.validation)
        )
        assert not train & validation
        assert train | validation == every - tested
        assert len(fold.train) + len(fold.validation) + len(folds.test) == 9000
        positives = corpus.evidence[sorted(validation)].sum(0)
        assert np.abs(positives - corpus.evidence.sum(0) * 0.16).max() <= 4
        held += sorted(validation)
    assert sorted(held) == sorted(every - tested)


def test_negative_ratio_samples_negatives_of_the_training_part_alone(corpus):
    tokenizer = learn_tokenizer([*corpus.texts, *corpus.criteria])
    tokens = tokenize_corpus(corpus, tokenizer, 64)
    folds = split_corpus(corpus, seed=1)
    whole = nli_dataset(tokens, folds)
    thin = nli_dataset(tokens, folds, negative_ratio=2)
    positives = int(whole.train.labels.sum())
    assert len(whole.train) == len(folds.folds[0].train)
    assert int(thin.train.labels.sum()) == positives
    assert len(thin.train) == 3 * positives
    assert len(thin.validation) == len(whole.validation)
    assert len(thin.test) == len(whole.test) == len(folds.test)
    assert thin.metadata["class_weights"] == [3 / 4, 3 / 2]
    n, p = len(whole.train), positives
    assert whole.metadata["class_weights"] == pytest.approx([n / 2 / (n - p), n / 2 / p])
    assert thin.metadata["train"]["positives"] == positives
    assert sum(thin.metadata["test"]["positives_by_criterion"].values()) == int(
        thin.test.labels.sum()
    )
    assert thin.metadata["validation"]["longest"] == int(whole.validation.lengths.max())


def test_negatives_are_drawn_by_the_seed():
    labels = np.array([1, 0] * 50)
    indices = np.arange(10, 100)
    draws = [sample_negatives(labels, indices, 0.5, seed).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) <= set(indices.tolist())
    assert len(sample_negatives(labels, indices, 1000, 0)) == 90
    assert sample_negatives(labels, indices, 0, 0).tolist() == list(range(10, 100, 2))


def test_the_real_data_is_never_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRAINFIT_CACHE", str(cache))
    write_files(tmp_path / "data", "small", 1)
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    tokenizer = learn_tokenizer(["mi tu"])
    *parts, _ = load_redsm5_nli(tmp_path / "data", tokenizer, max_length=64, seed=5)
    assert sum(map(len, parts)) == 9000
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before
    assert not cache.exists()


@pytest.mark.parametrize("types", [True, False])
def test_torch_collates_the_datasets_as_they_are(tmp_path: Path, types: bool):
    write_redsm5(tmp_path, posts=40)
    tokenizer = learn_tokenizer(["alder birch cedar"])
    if not types:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    *parts, metadata = load_redsm5_nli(tmp_path, tokenizer, max_length=96, seed=1)
    names = {"input_ids", "attention_mask", "labels"} | ({"token_type_ids"} if types else set())
    posts: list[set[str]] = []
    for part, name in zip(parts, ("train", "validation", "test"), strict=True):
        [batch] = DataLoader(part, batch_size=len(part))
        assert set(batch) == names
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (len(part), 96)
        assert batch["labels"].sum() == metadata[name]["positives"]
        padding = batch["attention_mask"] == 0
        assert padding.any()
        assert (batch["input_ids"][padding] == tokenizer.pad_token_id).all()
        assert (batch["attention_mask"].diff() <= 0).all()  # ones, then zeros
        texts = tokenizer.batch_decode(batch["input_ids"])
        posts.append({text.split("[SEP]")[0] for text in texts})
    assert sum(map(len, parts)) == 40 * 9
    assert not posts[0] & posts[1] | posts[0] & posts[2] | posts[1] & posts[2]


def test_too_few_posts_for_a_split_are_an_error_and_no_empty_validation(tmp_path: Path):
    corpus = read_redsm5(put(tmp_path, TWO, [mark("s_1_1", "FATIGUE", "1")]))
    with pytest.raises(BadInput, match="2 groups cannot be split into 5 parts"):
        split_corpus(corpus)
