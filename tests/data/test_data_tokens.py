"""Tokens, micro-batches of them against a plain loop, and tokenizers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.data.batches import collate_packed, collate_padded
from trainfit.data.synthetic import CUES, make_corpus
from trainfit.data.tokenizers import learn_tokenizer, load_tokenizer, pad_id, tokenizer_hash
from trainfit.data.tokens import from_lists, tokenize_pairs, tokenize_texts
from trainfit.kernels.attention import lay_out

POST = "one two three four five six seven eight nine ten"
CRITERIA = ["alpha beta", "gamma delta epsilon"]


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer([POST, *CRITERIA, "eleven twelve"] * 3)


sequences = st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=9), min_size=1, max_size=7)


@settings(max_examples=40)
@given(data=sequences, extra=st.integers(0, 6), slack=st.integers(0, 3), random=st.randoms())
def test_a_packed_batch_is_its_sequences_end_to_end(data, extra, slack, random):
    types = [[i % 2 for i in range(len(one))] for one in data]
    tokens = from_lists(data, list(range(len(data))), types=types)
    chosen = random.sample(range(len(data)), random.randint(0, len(data)))
    flat = [token for n in chosen for token in data[n]]
    width, slots = len(flat) + extra, len(chosen) + slack
    batch = collate_packed(tokens, chosen, width, slots, pad_id=1)
    assert batch["input_ids"].tolist() == [flat + [1] * extra]
    kinds = [kind for n in chosen for kind in types[n]]
    assert batch["token_type_ids"].tolist() == [kinds + [0] * extra]
    assert batch["labels"].tolist() == chosen + [-100] * slack
    layout = lay_out(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
    expected = [place for place, n in enumerate(chosen) for _ in data[n]] + [slots] * extra
    assert layout.ids.tolist() == [expected]
    assert layout.lengths.tolist() == [len(data[n]) for n in chosen] + [0] * slack
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].shape == (slots + 1,)


@settings(max_examples=40)
@given(data=sequences, extra=st.integers(0, 4), rows=st.integers(0, 2), random=st.randoms())
def test_a_padded_batch_has_a_row_for_each_sequence(data, extra, rows, random):
    tokens = from_lists(data, list(range(len(data))))
    chosen = random.sample(range(len(data)), random.randint(0, len(data)))
    width = max((len(data[n]) for n in chosen), default=1) + extra
    batch = collate_padded(tokens, chosen, len(chosen) + rows, width, pad_id=3)
    expected = [data[n] + [3] * (width - len(data[n])) for n in chosen] + [[3] * width] * rows
    real = [[1] * len(data[n]) + [0] * (width - len(data[n])) for n in chosen]
    assert batch["input_ids"].tolist() == expected
    assert batch["attention_mask"].tolist() == real + [[1] + [0] * (width - 1)] * rows
    assert batch["labels"].tolist() == chosen + [-100] * rows
    assert "token_type_ids" not in batch


def test_a_batch_that_does_not_fit_is_refused():
    tokens = from_lists([[5, 6, 7], [8]], [0, 1])
    for call in (
        lambda: collate_packed(tokens, [0, 1], 3, 2),
        lambda: collate_packed(tokens, [0, 1], 4, 1),
        lambda: collate_padded(tokens, [0], 1, 2),
        lambda: collate_padded(tokens, [0, 1], 1, 3),
    ):
        with pytest.raises(BadInput, match="cut the step again"):
            call()


def test_a_subset_shares_the_tokens_and_keeps_its_order():
    tokens = from_lists([[5], [6, 7], [8, 9, 10]], [0, 1, 0], groups=np.array([4, 5, 6]))
    part = tokens.subset([2, 0]).subset([1, 0])
    assert part.ids is tokens.ids
    assert [part.sequence(n).tolist() for n in range(len(part))] == [[5], [8, 9, 10]]
    assert part.groups is not None
    assert part.groups.tolist() == [4, 6]
    assert part.lengths.tolist() == [1, 3]


@pytest.mark.parametrize("max_length", [8, 9, 12, 40])
def test_truncation_spares_the_criterion(tokenizer, max_length):
    posts = [POST, "one", "one two three"]
    text_of, second_of = np.repeat(np.arange(3), 2), np.tile(np.arange(2), 3)
    labels = [0, 1, 0, 0, 1, 0]
    tokens = tokenize_pairs(
        tokenizer, posts, CRITERIA, text_of, second_of, labels, max_length=max_length
    )
    assert tokens.lengths.max() <= max_length
    assert tokens.labels.tolist() == labels
    for n in range(6):
        ids = tokens.sequence(n).tolist()
        start = int(tokens.starts[n])
        kinds = tokens.types[start : start + len(ids)]
        post, criterion = (
            tokenizer.decode(
                [i for i, k in zip(ids, kinds, strict=True) if k == side], skip_special_tokens=True
            ).strip()
            for side in (0, 1)
        )
        assert criterion == CRITERIA[second_of[n]]
        assert post
        assert posts[text_of[n]].startswith(post)
        assert tokenizer.convert_ids_to_tokens(ids)[0] == "[CLS]"
        assert ids.count(tokenizer.sep_token_id) == 2


def test_lengths_are_those_of_the_sequences_and_not_of_the_longest(tokenizer):
    texts = ["one two", POST, "one"]
    tokens = tokenize_texts(tokenizer, texts, [0, 1, 0], max_length=512)
    assert tokens.lengths.tolist() == [4, 12, 3]
    assert tokens.ids.size == 19


def test_a_criterion_that_leaves_no_room_is_an_error(tokenizer):
    with pytest.raises(BadInput, match="max_length is 6, but a criterion alone takes 6"):
        tokenize_pairs(
            tokenizer, [POST], CRITERIA, np.zeros(1, int), np.ones(1, int), [0], max_length=6
        )


def test_without_a_separator_of_its_own_a_pair_gets_a_new_line():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "post": 1, "criterion": 2, "\n": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=["input_ids"])
    tokens = tokenize_pairs(
        plain, ["post"], ["criterion"], np.zeros(1, int), np.zeros(1, int), [1], max_length=9
    )
    assert tokens.sequence(0).tolist() == [1, 3, 2]
    assert tokens.types is None


def test_a_learned_tokenizer_knows_invented_words_whole_and_any_other_text():
    corpus = make_corpus("small", 0)
    learned = learn_tokenizer([*corpus.texts, *corpus.criteria])
    for cue in CUES[:9]:
        assert len(learned(f"mi {cue}", add_special_tokens=False)["input_ids"]) == 2
    strange = "đây là một câu 🙂 !"
    ids = learned(strange)["input_ids"]
    assert learned.unk_token_id not in ids
    assert learned.decode(ids, skip_special_tokens=True).strip() == strange
    assert [learn_tokenizer(["a b"], pad_id=n).pad_token_id for n in (0, 1, 3)] == [0, 1, 3]
    assert pad_id(learned) == 0


def test_a_tokenizers_hash_is_of_what_it_does(tokenizer):
    before = tokenizer_hash(tokenizer)
    tokenizer(POST, truncation=True, max_length=4)
    same = learn_tokenizer([POST, *CRITERIA, "eleven twelve"] * 3)
    assert tokenizer_hash(tokenizer) == before == tokenizer_hash(same)
    assert tokenizer_hash(learn_tokenizer([POST])) != before


def test_a_tokenizer_is_loaded_from_a_folder_and_one_line_says_that_there_is_none(
    tmp_path: Path, tokenizer
):
    tokenizer.save_pretrained(tmp_path / "there")
    loaded = load_tokenizer(str(tmp_path / "there"))
    assert loaded(POST, CRITERIA[0])["input_ids"] == tokenizer(POST, CRITERIA[0])["input_ids"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no tokenizer in") as caught:
        load_tokenizer(str(tmp_path / "empty"))
    assert len(str(caught.value).splitlines()) == 1


def test_importing_the_data_package_is_light():
    code = (
        "import sys, trainfit.data, trainfit.data.redsm5, trainfit.data.folds;"
        "import trainfit.data.synthetic;"
        "import trainfit.jobs.metrics, trainfit.jobs.baselines;"
        "heavy = {'torch', 'sklearn', 'transformers', 'pyarrow', 'scipy', 'datasets'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_of_the_package_can_be_imported():
    import trainfit.data as package

    assert all(getattr(package, name) is not None for name in package.__all__)
