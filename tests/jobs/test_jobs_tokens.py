"""Token classification from files to answers: scores, baselines, folds, predictions, refusals."""

import csv
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from job_tiny import SECRET, be_quick, words
from trainfit.cli.main import run as run_command
from trainfit.conf.composition import compose, layer, options
from trainfit.core.errors import BadInput
from trainfit.data.conll_files import read_sentences
from trainfit.data.synthetic import make_tagged
from trainfit.hpo.studies import read_setting
from trainfit.jobs.configuration import configure
from trainfit.jobs.registry import job_module

f1_score = pytest.importorskip("seqeval.metrics").f1_score
get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
FIRST, LAST = ("Anna", "Bo", "Cleo"), ("Alder", "Birch")
FILLERS = ("left", "saw", "the", "small", "house", "Alder")
Sentences = list[list[tuple[str, str]]]


def sentences(count: int, seed: int) -> Sentences:
    """Names of one or two words; a last name alone is no name."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        words = [(str(word), "O") for word in random.choice(FILLERS, int(random.integers(1, 5)))]
        name = [(str(random.choice(FIRST)), "B-PER")]
        if random.random() < 0.5:
            name.append((str(random.choice(LAST)), "I-PER"))
        at = int(random.integers(len(words) + 1))
        made.append([*words[:at], *name, *words[at:]])
    return made


def write_conll(path: Path, rows: Sentences) -> Path:
    lines = ("\n".join(f"{word} x {tag}" for word, tag in row) for row in rows)
    path.write_text("-DOCSTART- -X- O\n\n" + "\n\n".join(lines) + "\n")
    return path


def folder_of_splits(folder: Path) -> dict[str, Sentences]:
    folder.mkdir(exist_ok=True)
    parts = {"train": sentences(200, 0), "dev": sentences(40, 1), "test": sentences(40, 2)}
    for name, rows in parts.items():
        write_conll(folder / f"{name}.conll", rows)
    return parts


def tagged_rows(path: Path, classes: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """True and predicted tags of each sentence of predictions.csv."""
    true, said = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    with path.open() as file:
        for row in csv.DictReader(file):
            true[row["fold"], row["id"]].append(classes[int(row["label"])])
            said[row["fold"], row["id"]].append(classes[int(row["prediction"])])
    return list(true.values()), list(said.values())


def test_the_job_from_files_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    be_quick(monkeypatch)
    parts = folder_of_splits(tmp_path / "data")
    more = ("data.max_length=40", "training.num_epochs=3", "baselines=true")
    composed = configure("tokens", words(tmp_path, f"data.train={tmp_path / 'data'}", *more))
    assert "the words are the column tokens, the tags tags" in composed.notes
    assert "data.validation is dev.conll of the same folder" in composed.notes
    result = job_module("tokens").train(composed)
    folder, classes = Path(result.run), ["B-PER", "I-PER", "O"]
    true, said = tagged_rows(folder / "predictions.csv", classes)
    assert true == [[tag for _, tag in row] for row in parts["test"]]
    assert result.metrics["f1"] == pytest.approx(f1_score(true, said))
    assert result.metrics["f1"] > 0.5
    assert set(result.by_label) == {"PER"}
    scores = json.loads((folder / "scores.json").read_text())
    low, high = scores["ci95"]["f1"]
    assert low <= result.metrics["f1"] <= high
    assert result.baselines == pytest.approx(baselines(parts))
    assert run_command(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "each word&#39;s commonest tag" in page or "each word's commonest tag" in page
    assert "By type" in page
    assert "bootstrap intervals over sentences" in page
    card = (folder / "export" / "README.md").read_text()
    assert 'pipeline_tag: "token-classification"' in card

    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    shown: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1], shown)
    text = " ".join(word for word, _ in parts["test"][0])
    spans = get_entities(said[0])
    found = shown["tag"](str(folder / "export"), text)
    assert [one["entity_group"] for one in found] == [kind for kind, *_ in spans]

    capsys.readouterr()
    test = tmp_path / "data" / "test.conll"
    assert run_command(["predict", str(folder), str(test)]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [row["tag"] for row in answers] == [tag for row in said for tag in row]
    assert [row["word"] for row in answers] == [word for row in parts["test"] for word, _ in row]
    assert {row["row"] for row in answers} == set(range(1, 41))
    assert run_command(["predict", str(folder), str(test), "--format", "csv"]) == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["tag"] for row in table] == [row["tag"] for row in answers]
    assert run_command(["predict", str(folder), "--text", "Anna left", "--second", "x"]) == 2
    assert run_command(["predict", str(folder), "--text", " "]) == 2
    assert "there is no word to tag" in capsys.readouterr().err


def test_sentences_to_tag_come_in_any_form(tmp_path: Path):
    rows = sentences(9, 4)
    texts = [[word for word, _ in row] for row in rows]
    (tmp_path / "a.txt").write_text("\n".join(map(" ".join, texts)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"tokens": t}) + "\n" for t in texts))
    (tmp_path / "b.csv").write_text("text\n" + "\n".join(map(" ".join, texts)) + "\n")
    (tmp_path / "b.conll").write_text("\n\n".join(map("\n".join, texts)))
    write_conll(tmp_path / "b.txt", rows)
    for name in ("a.txt", "a.jsonl", "b.csv", "b.conll", "b.txt"):
        found = read_sentences(tmp_path / name, "auto", ["B-PER", "I-PER", "O"])
        assert found == dict(enumerate(texts, 1)), name
    lines = read_sentences(tmp_path / "b.txt", "auto", ["NOUN"]).values()
    assert [words for words in lines if words][1:] == [
        f"{word} x {tag}".split() for row in rows for word, tag in row
    ]
    (tmp_path / "gaps.jsonl").write_text(
        '{"tokens": ["Bo"]}\n\n{"tokens": []}\n{"tokens": ["ran"]}\n'
    )
    assert read_sentences(tmp_path / "gaps.jsonl", "auto", []) == {1: ["Bo"], 3: [], 4: ["ran"]}


def baselines(parts: dict[str, Sentences]) -> dict[str, float]:
    """Each word's commonest tag, by its letters, as the first of equally common ones."""
    counts = defaultdict[str, Counter[str]](Counter)
    for row in (*parts["train"], *parts["dev"]):
        for word, tag in row:
            counts[word][tag] += 1
    true = [[tag for _, tag in row] for row in parts["test"]]
    said = [[counts[word].most_common(1)[0][0] for word, _ in row] for row in parts["test"]]
    return {"all_o_f1": 0.0, "word_tags_f1": f1_score(true, said)}


def test_folds_and_parts_of_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    be_quick(monkeypatch)
    rows = [
        [(word, "NOUN" if tag != "O" else "X") for word, tag in row] for row in sentences(90, 3)
    ]
    rows[5].append((SECRET, "X"))
    path = tmp_path / "pos.jsonl"
    objects = ({"words": [w for w, _ in row], "tags": [t for _, t in row]} for row in rows)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    more = ("cv.folds=2", "data.max_length=30", "training.num_epochs=1")
    result = job_module("tokens").train(
        configure("tokens", words(tmp_path, f"data.train={path}", *more))
    )
    assert len(result.metrics["folds"]) == 2
    true, said = tagged_rows(Path(result.run) / "predictions.csv", ["NOUN", "X"])
    words_right = np.concatenate(true) == np.concatenate(said)
    assert np.array(result.metrics["confusion"]).trace() == words_right.sum()
    assert result.metrics["count"] == len(words_right)
    assert set(result.by_label) == {"NOUN", "X"}
    written = [file for file in Path(result.run).rglob("*") if file.is_file()]
    assert len(written) > 20
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"tokens": ["secret", "b"], "tags": ["O"]}], "row 1: 2 words and 1 tags"),
        ([{"text": "secret", "label": "x"}], "row 1, column text: the words are no list"),
        (
            [{"tokens": [f"w{n}"], "tags": [f"secret {n}"]} for n in range(40)],
            "40 different labels in 40 rows",
        ),
    ],
)
def test_bad_files_are_refused_before_torch_is_imported(
    tmp_path: Path, rows: list[Any], message: str
):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import sys; from trainfit.cli.main import run; "
        f"code = run(['train', 'tokens', {str(path)!r}, '--model', 'bert-base']); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "secret" not in done.stderr


def test_what_tokens_cannot_be_set_to(tmp_path: Path):
    for word in ("model.pooling=mean", "data.target=multi"):
        with pytest.raises(BadInput, match=word.partition("=")[0]):
            compose("tokens", [word])
    path = tmp_path / "a.csv"
    path.write_text("tokens,tags\na,b\n")
    with pytest.raises(BadInput, match="no columns of sentences, words and tags"):
        configure("tokens", words(tmp_path, f"data.train={path}"))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"tokens": ["a", "b"], "ner_tags": [0, 1]}) + "\n")
    both = ("data.words_column=tokens", "data.label_column='tokens+ner_tags'")
    with pytest.raises(BadInput, match=r"has no column tokens\+ner_tags"):
        configure("tokens", words(tmp_path, f"data.train={path}", *both))
    frozen = configure("tokens", words(tmp_path, f"data.train={path}", "model.freeze_encoder=true"))
    assert "the frozen encoder runs in every epoch: no output per word is kept" in frozen.notes
    notes = configure("tokens", words(tmp_path, f"data.train={path}")).notes
    assert not any("frozen" in note for note in notes)
    assert any("tags are numbers without names" in note for note in notes)


def test_presets_are_those_of_textclass_and_studies_pool_nothing():
    assert options("tokens", "hardware") == options("textclass", "hardware")
    assert layer("tokens", "hardware", "t4") == layer("textclass", "hardware", "t4")
    for study in ("default", "embedded"):
        setting = read_setting("tokens", [f"hpo={study}"])
        assert "model.pooling" not in setting.hpo.space
        assert "training.learning_rate" in setting.hpo.space


def test_made_up_tags_depend_on_other_words():
    rows, tags = make_tagged(seed=3)
    assert (rows, tags) == make_tagged(seed=3)
    of = defaultdict[str, set[str]](set)
    for words_of, tags_of in zip(rows, tags, strict=True):
        assert len(words_of) == len(tags_of)
        for word, tag in zip(words_of, tags_of, strict=True):
            of[word].add(tag)
    assert {tag for each in of.values() for tag in each} == {
        "O",
        "B-LOC",
        "B-ORG",
        "I-ORG",
        "B-PER",
    }
    assert all("O" in each for each in of.values())


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_made_up_sentences_are_learned(tmp_path: Path):
    result = job_module("tokens").train(configure("tokens", [f"runs_dir={tmp_path}", "tune=off"]))
    assert result.metrics["f1"] > 0.95 > result.baselines["word_tags_f1"]
