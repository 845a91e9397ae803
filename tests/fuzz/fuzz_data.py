"""Data files of every form, and corpora."""

from __future__ import annotations

import random

from fuzz_case import FIFO, FOLDER, LOOP, ZERO, Case, Edit, Special, kind
from fuzz_damage import DAMAGES
from fuzz_templates import TINY
from fuzz_values import TEXTS

_FORMS = ["csv", "tsv", "jsonl", "json", "parquet", "arrow"]
_SPECIAL = [FIFO, FOLDER, LOOP, ZERO]
_CONTENTS: dict[str, str | bytes] = {
    "empty": "",
    "NUL bytes": bytes(2000),
    "noise": bytes(range(256)) * 30,
    "header alone": "text,label\n",
    "one row": "text,label\na,0\n",
    "no labels": "text\na\nb\n",
    "two columns of one name": "text,text,label\na,b,0\nc,d,1\n" * 5,
    "two label columns": "text,label,label\na,0,1\nc,1,0\n",
    "ragged": "text,label\na\nb,1,2,3\n" * 5,
    "open quote": 'text,label\n"a,0\nb,1\n',
    "a long field": "text,label\n" + "x" * 300_000 + ",0\n" + "y,1\n" * 9,
    "empty texts": "text,label\n,0\n,1\n" * 20,
    "semicolons": "review;sentiment\n" + "a, b;0\nc;1\n" * 20,
    "two separators": "text;more,label\n" + "a;b,0\nc;d,1\n" * 20,
    "an index": ",review,sentiment\n" + "0,a,0\n1,b,1\n" * 20,
    "unknown columns": "x|y|z\n" + "a|b|0\n" * 20,
    "no header": "a sentence of its own,0\nanother one,1\n" * 20,
    "a list of objects": '[{"text": "a", "label": 0}, {"text": null}, {"label": 1}]',
    "one class": "text,label\n" + "a,0\n" * 40,
    "a class per row": "text,label\n" + "".join(f"t{n},{n}\n" for n in range(40)),
    "labels with NUL": b"text,label\n" + b"a,\0\nb,\x01\n" * 20,
    "bad UTF-8": b"text,label\n\xff\xfe,0\n\x80,1\n" * 10,
    "UTF-16": "text,label\na,0\nb,1\n".encode("utf-16"),
    "surrogates": '{"text": "\\ud800", "label": 0}\n{"text": "a", "label": 1}\n' * 20,
    "nested": '{"text": {"a": 1}, "label": 0}\n' * 20,
    "deep": '{"text": ' + "[" * 50_000 + "]" * 50_000 + ', "label": 0}\n',
    "numbers as texts": '{"text": 1, "label": 0}\n{"text": 2, "label": 1}\n' * 20,
    "nan labels": '{"text": "a", "label": NaN}\n{"text": "b", "label": 1}\n' * 20,
    "lists as labels": '{"text": "a", "label": [1]}\n{"text": "b", "label": []}\n' * 20,
    "labels of two types": '{"text": "a", "label": 1}\n{"text": "b", "label": "1"}\n' * 20,
    "lines that are no objects": '3\n"x"\n[1]\nnull\n',
    "same key twice": '{"text": "a", "text": "b", "label": 0}\n{"text": "c", "label": 1}\n' * 20,
    "huge number": '{"text": "a", "label": 1' + "0" * 5000 + "}\n",
    "parquet's mark": b"PAR1" + bytes(40) + b"PAR1",
    "arrow's mark": b"ARROW1\0\0" + bytes(40) + b"ARROW1",
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.",
    "a zip": b"PK\x03\x04" + bytes(60),
    "a gzip": b"\x1f\x8b\x08" + bytes(60),
}


def _words(key: str, value: str) -> list[str]:
    own = [word for word in TINY["textclass"] if word.partition("=")[0] != key]
    return [*own, f"{key}={value}", "runs_dir=runs"]


@kind(10)
def data_files(chosen: random.Random) -> Case:
    """Contents that are no data, under any ending."""
    name = f"d.{chosen.choice([*_FORMS, 'txt', 'xlsx', 'CSV'])}"
    content: str | bytes | Special = chosen.choice(list(_CONTENTS.values()))
    if chosen.random() < 0.15:
        content = chosen.choice(_SPECIAL)
    key = chosen.choice(["data.train", "data.train", "data.validation", "data.test"])
    if chosen.random() < 0.15:
        argv = ["predict", "runs/run", "--file", name]
    else:
        argv = ["train", "textclass", "--dry-run", *_words(key, name)]
    return Case(argv, files={name: content}, template="textclass")


@kind(12)
def damaged_data(chosen: random.Random) -> Case:
    """Whole files, damaged."""
    form = chosen.choice(_FORMS)
    how = chosen.choice(sorted(set(DAMAGES) - {"delete_folder"}))
    edit = Edit(how, chosen.randrange(2**32), f"data.{form}")
    argv = ["train", "textclass", "--dry-run", *_words("data.train", f"data.{form}")]
    return Case(argv, template="textclass", edits=(edit,))


_TAGGED: dict[str, str | bytes] = {
    "CoNLL": "-DOCSTART- O\n\n" + "Anna B-PER\nleft O\n\n" * 20,
    "tabs and comments": "# id = 1\nAnna May\tx\tB-PER\r\nleft\tx\tO\n\n" * 20,
    "one column": "Anna\nleft\n\n" * 20,
    "prose": "a sentence of several words\nanother one\n" * 20,
    "ragged fields": "Anna B-PER\nleft the O\n\n" * 9,
    "empty lines": "\n \n\t\n" * 30,
    "a word per tag": "".join(f"w{n} t{n}\n" for n in range(90)),
    "one sentence": "Anna B-PER\nleft O\n",
    "one tag": "Anna O\n\n" * 30,
    "lists": '{"tokens": ["a", "b"], "ner_tags": ["B-X", "O"]}\n' * 30,
    "other numbers": '{"tokens": ["a", "b"], "tags": ["O"]}\n' * 9,
    "empty lists": '{"tokens": [], "tags": []}\n' * 9,
    "blank words": '{"tokens": ["", " ", "\\u200b", "\\u0000"], "tags": [0, 1, 0, 1]}\n' * 30,
    "texts for lists": '{"tokens": "a b", "tags": "O O"}\n' * 9,
    "lists in lists": '{"tokens": [["a"]], "tags": [["O"]]}\n' * 9,
    "numbers and names": '{"tokens": ["a", "b"], "tags": [1, "O"]}\n' * 9,
    "null tags": '{"tokens": ["a"], "tags": [null]}\n{"tokens": ["a"]}\n' * 9,
    "surrogates in words": '{"tokens": ["\\ud800"], "tags": ["\\udcff"]}\n' * 9,
    "strange tags": '{"tokens": ["a", "b"], "tags": ["-", "B-"]}\n' * 30,
}


@kind(6)
def tagged_files(chosen: random.Random) -> Case:
    """Words with tags, or no such thing, under any ending."""
    usual = [*_TAGGED.values()] * 4
    content: str | bytes | Special = chosen.choice([*usual, *_CONTENTS.values(), *_SPECIAL])
    ending = "jsonl" if str(content).startswith("{") else chosen.choice(["conll", "txt", "tsv"])
    if chosen.random() < 0.2:
        ending = chosen.choice(["bio", "json", "parquet", "csv"])
    name = f"d.{ending}"
    words = [*_words("data.train", name)]
    if chosen.random() < 0.2:
        key = chosen.choice(["data.words_column", "data.label_column", "data.group_column"])
        words.append(f"{key}={chosen.choice([*TEXTS, 'tokens', 'tags'])}")
    dry = chosen.choice([["--dry-run"], ["--dry-run"], []])
    return Case(["train", "tokens", *dry, *words], files={name: content}, template="textclass")


@kind(6)
def saved_datasets(chosen: random.Random) -> Case:
    how = chosen.choice(["json", *DAMAGES])
    among = "*.json" if how == "json" else chosen.choice(["data-*.arrow", "*.json"])
    edit = Edit(how, chosen.randrange(2**32), among)
    argv = ["train", "textclass", "--dry-run", *_words("data.train", "saved")]
    return Case(argv, template="textclass", edits=(edit,))


@kind(5)
def columns(chosen: random.Random) -> Case:
    form = chosen.choice(_FORMS)
    key = chosen.choice(["data.text_column", "data.label_column", "data.group_column"])
    value = chosen.choice([*TEXTS, "text", "label", "nowhere"])
    words = [*_words("data.train", f"data.{form}"), f"{key}={value}"]
    return Case(["train", "textclass", "--dry-run", *words], template="textclass")


@kind(6)
def redsm5_folders(chosen: random.Random) -> Case:
    argv = ["train", "nli", "--dry-run", *TINY["nli"], "runs_dir=runs"]
    name = chosen.choice(["redsm5_posts.csv", "redsm5_annotations.csv"])
    if chosen.random() < 0.5:
        how = chosen.choice(sorted(DAMAGES))
        return Case(argv, template="nli", edits=(Edit(how, chosen.randrange(2**32), name),))
    content = chosen.choice([*_CONTENTS.values(), *_SPECIAL])
    return Case(argv, template="nli", files={f"data/{name}": content})


@kind(8)
def corpora(chosen: random.Random) -> Case:
    name = f"d.{chosen.choice([*_FORMS, 'txt', 'py'])}"
    content: str | bytes | Special = chosen.choice([*_CONTENTS.values(), *_SPECIAL])
    source = chosen.choice([name, name, "corpus", "corpus.jsonl", "corpus.csv", "nowhere", "", "/"])
    if source == "/":
        source = "corpus/../" * 500 + "corpus"
    options = {
        "--vocab-size": ["0", "-1", "1", "256", "300", "2000000000", str(10**30), "x", "nan"],
        "--validation": ["0", "1", "-1", "nan", "inf", "0.5", "1e400", "x"],
        "--separator": ["", "\\", "\\x", "\\ud800", "\\0", "x" * 5000, "\\N{x}", "ä", "\\uffff"],
        "--special": ["", "a", "\0", "x" * 5000, "<|endoftext|>", "\udcff"],
        "--column": ["", "text", "nowhere", "\0", "x" * 5000],
        "--seed": ["-1", "0", str(10**30), str(2**63), "nan"],
        "--processes": ["1", "0", "-1", str(10**30)],
        "--tokenizer": ["nowhere", name, "corpus", "/dev/null", "t" * 5000],
    }
    more = []
    for option in chosen.sample(sorted(options), chosen.choice([0, 1, 1, 2])):
        more += [option, chosen.choice(options[option])]
    if "--processes" not in more:
        more += ["--processes", "1"]
    output = chosen.choice(["out", "out", "out", "out", "corpus", "/dev/null/x", "o" * 5000])
    argv = ["prepare", "gpt", "--input", source, "--output", output, *more]
    return Case(argv, template="corpus", files={name: content})


@kind(6)
def token_folders(chosen: random.Random) -> Case:
    how = chosen.choice(["json", "json", *DAMAGES])
    among = "*.json" if how == "json" else chosen.choice(["*.bin", "*.json"])
    edit = Edit(how, chosen.randrange(2**32), f"tokens/{among}")
    argv = ["train", "gpt", *chosen.choice([["--dry-run"], []]), *TINY["gpt"], "runs_dir=runs"]
    return Case(argv, template="gpt", edits=(edit,))
