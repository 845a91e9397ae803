"""`train gpt` on a text as it is: prepared, held out at its end, and with a model of its size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt_tiny import be_quick
from plan_example import make_plan
from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.core.plan_records import TimeEstimate
from trainfit.data.corpus import read_pieces
from trainfit.data.token_files import open_tokens
from trainfit.data.token_preparation import Preparation, text_tokens
from trainfit.data.tokenizers import load_bpe
from trainfit.hardware.model_shapes import sizes_of
from trainfit.jobs import job_plan, job_times, plan_choices
from trainfit.jobs.configuration import configure, configured_by

WORDS = "alder birch cedar dogwood elm fir ginkgo hazel ivy juniper kapok larch".split(" ")  # noqa: SIM905
STEPS = ("training.max_steps=4", "training.eval_iters=2", "data.max_length=32", "model.n_layer=1")


def write_text(path: Path, size: int, seed: int = 0) -> Path:
    random, lines, done = np.random.default_rng(seed), [], 0
    while done < size:
        lines.append(" ".join(random.choice(WORDS, 12)) + ".")
        done += len(lines[-1]) + 1
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def test_a_text_file_is_trained_on_and_said_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "input.txt", 200_000)
    assert run(["train", "gpt", "input.txt", *STEPS, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "0.2 MB of text, about 179,000 tokens (bytes): gpt-tiny, which suits" in captured.err
    data = json.loads(Path(result["run"], "data.json").read_text())["header"]
    # One document, of bytes: the last tenth is held out at a line's end, with an end for each part.
    size = text.stat().st_size
    assert data["train"]["tokens"] + data["validation"]["tokens"] == size + 2
    assert data["validation"]["tokens"] == pytest.approx(0.1 * size, abs=200)
    assert result["val_loss"] < np.log(257)
    again = configured_by(Path(result["run"]), "gpt")  # as --resume reads it
    asked = configure("gpt", ["data.data_dir=input.txt", *STEPS]).config
    assert (again.config.data, again.config.training) == (asked.data, asked.training)
    assert again.origins["model.name"] == plan_choices.ORIGIN


def test_the_parts_of_a_text_are_the_text(tmp_path: Path):
    path = write_text(tmp_path / "one.txt", 30_000)
    pieces = list(read_pieces([path], seed=1, ends=0.1))
    assert "".join(piece.text for piece in pieces) == path.read_text()
    assert [piece.place for piece in pieces] == [0.1, 0.0]
    assert pieces[0].text.endswith(".\n")


def test_few_files_lose_their_ends_and_many_are_held_out_whole(tmp_path: Path):
    how = Preparation(vocab_size=257, validation_share=0.1, seed=1)
    for count, documents in ((3, 3), (150, None)):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            write_text(folder / f"{number}.txt", 600, seed=number)
        (folder / "notes.py").write_text("not a text of the corpus")
        made = open_tokens(text_tokens(folder, how))
        held, trained = made.header.validation.documents, made.header.train.documents
        assert held is not None
        assert trained is not None
        if documents:
            assert (held, trained) == (documents, documents)
        else:
            assert held + trained == count
            assert 2 < held < 40
    assert text_tokens(tmp_path / "3", how) == text_tokens(tmp_path / "3", how)
    (tmp_path / "3/0.txt").write_text("another text " * 50)
    assert text_tokens(tmp_path / "3", how) not in [text_tokens(tmp_path / "150", how)]


def test_a_rare_piece_of_a_text_is_no_token(tmp_path: Path):
    path = write_text(tmp_path / "input.txt", 20_000)
    with path.open("a") as file:
        file.write("\n" + "Zyxwvut " * 20)
    folder = text_tokens(path, replace(the_preparation(), validation_share=0.01))
    words = load_bpe(folder / "tokenizer.json").get_vocab()
    assert any("juniper" in word for word in words)
    assert not any("Zyx" in word for word in words)


def the_preparation() -> Preparation:
    config = configure("gpt", ["data.vocab_size=400"]).config
    return plan_choices.preparation(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "words"), [(1000, 257), (200_000, 257), (1_100_000, 1024), (10**8, 8192)]
)
def test_a_larger_text_gets_a_larger_vocabulary(size: int, words: int):
    assert plan_choices.vocabulary(size) == words


@pytest.mark.parametrize(
    ("tokens", "rate", "name"),
    [
        (50_000, 3e14, "gpt-tiny"),  # too little text for more, on any machine
        (400_000, 8e10, "gpt-tiny"),  # two cores
        (400_000, 2e13, "gpt-mini"),  # a T4
        (10**9, 8e10, "gpt-tiny"),
        (10**9, 3e14, "gpt-small"),  # an H200
    ],
)
def test_the_model_suits_the_text_and_the_machine(tokens: int, rate: float, name: str):
    assert plan_choices.choose_size(tokens, 1024, rate) == name


def test_what_is_set_stays_and_the_rest_goes_by_it(tmp_path: Path):
    path = write_text(tmp_path / "input.txt", 100_000)
    words = [f"data.data_dir={path}", "model.name=gpt-small", "training.num_epochs=3"]
    config = configure("gpt", [*words, "training.batch_size=2", "data.max_length=64"]).config
    assert (config.model.name, config.training.num_epochs) == ("gpt-small", 3)
    assert config.training.max_steps is None
    assert config.training.effective_batch_size == "auto"
    steps = 3 * 90_000 / (2 * 64)
    assert config.training.eval_steps == pytest.approx(steps / 10, rel=0.01)


WRONG = {
    "gone.txt": "no file or folder gone.txt",
    "empty.txt": "empty.txt is empty",
    "blank.txt": "blank.txt is empty",
    "binary.txt": "binary.txt is binary",
    "nothing": "there are no token files and no texts in nothing",
    "rows.csv": "rows.csv has no column text",
}


def test_what_is_no_text_is_told_in_a_line_before_torch(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/image.png").write_bytes(b"\x89PNG")
    (tmp_path / "rows.csv").write_text("words\na\n")
    code = (
        "import sys\nfrom trainfit.cli.main import run\n"
        f"for name in {list(WRONG)!r}:\n"
        "    assert run(['train', 'gpt', f'data.data_dir={name}']) == 2, name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG), done.stderr
    for said, line in zip(WRONG.values(), lines, strict=True):
        assert said in line


# ── long jobs ─────────────────────────────────────────────────────────────────────────────────


def test_a_job_of_hours_says_so_and_what_takes_one():
    plan = make_plan()
    question = job_plan.question(configure("gpt", ["model.name=gpt-tiny"]))
    time = TimeEstimate(
        tokens_per_second=None,
        samples_per_second=None,
        mfu=None,
        step_seconds=None,
        epoch_seconds=None,
        total_seconds=None,
        error_percent=None,
        job_seconds=10 * 3600,
    )
    load = replace(plan.workload, sequences=1000 * plan.effective_batch_size, epochs=1)
    long = replace(plan, time=time, workload=load)
    said = job_times.length_note(long, question, named_model=True)
    assert said == (
        "this job takes about 10 hours on this machine; for about an hour, set "
        "training.max_steps=100 in place of 1,000, or take a smaller model (model.name)"
    )
    short = replace(long, time=replace(time, job_seconds=60.0))
    assert job_times.length_note(short, question, named_model=True) is None


def test_a_cpu_without_recorded_times_goes_by_operations():
    """6 operations for a weight and a token, at 40 billion a second and core."""
    composed = configure("gpt", ["model.name=gpt-medium", "data.max_length=1024"])
    question = job_plan.question(composed, [1024] * 64)
    question = replace(question, workload=replace(question.workload, sequences=10_000, epochs=1))
    plan = replace(make_plan(), device="cpu", time=None, workload=question.workload)
    plan = replace(plan, runtime=replace(plan.runtime, num_threads=2))
    hours = 6 * 334e6 * 10_000 * 1024 / (2 * 4e10) / 3600
    said = job_times.length_note(plan, question, named_model=True)
    assert said is not None
    assert int(said.split("about ")[1].split(" ")[0]) == pytest.approx(hours, rel=0.05)
    assert sizes_of({"model_type": "unheard of"}) is None
    unknown = replace(question, sizes=None)
    assert job_times.length_note(plan, unknown, named_model=True) is None


# ── what a plan knows of the data ─────────────────────────────────────────────────────────────


def test_a_plan_counts_the_rows_and_classes_of_a_file(tmp_path: Path):
    rows = [f"{'word ' * (3 + n % 5)},{'abc'[n % 3]}" for n in range(200)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    composed = configure(
        "textclass", [f"data.train={tmp_path / 'rows.csv'}", "model.name=bert-base"]
    )
    asked = job_plan.question(composed)
    data = composed.config.data
    kept = round(200 * (1 - data.test_share) * (1 - data.validation_share))
    assert asked.data == f"rows.csv: 200 rows, 3 classes, {kept} of them to train on"
    assert asked.workload.sequences == len(asked.workload.lengths) == kept
    assert {round(1.3 * n) + 2 for n in range(3, 8)} == set(asked.workload.lengths)
    assert asked.assumed == ("1.3 tokens per word of rows.csv",)


def test_a_plan_counts_tokens_and_says_what_it_assumes(tmp_path: Path):
    path = write_text(tmp_path / "input.txt", 100_000)
    asked = job_plan.question(configure("gpt", [f"data.data_dir={path}"]))
    tokens = round(0.9 * path.stat().st_size / (1 + 0.55 * np.log2(257 / 256)))
    assert asked.data == f"input.txt: {tokens:,} tokens to train on"
    assert asked.workload.sequences == (tokens - 1) // 128
    folder = text_tokens(path, Preparation(vocab_size=257, validation_share=0.1))
    words = [f"data.data_dir={folder}", "data.max_length=64"]
    known = job_plan.question(configure("gpt", words))
    assert known.workload.sequences == (open_tokens(folder).header.train.tokens - 1) // 64
    assert known.assumed == ()
    nothing = job_plan.question(compose("nli"))
    assert nothing.data is None
    said = "1,484 posts with 9 criteria each, as long as ReDSM5's: no data is named"
    assert nothing.assumed == (said,)


def test_a_text_in_another_encoding_is_told_or_refused(tmp_path: Path) -> None:
    """No letter becomes a replacement character, and the border is that of what was read."""
    text = "Le café de l'été.\n" * 200
    old = tmp_path / "old.txt"
    old.write_bytes(text.encode("windows-1252"))
    with pytest.warns(TrainfitWarning, match=r"old.txt is not UTF-8 and is read as Windows-1252"):
        pieces = list(read_pieces([old], seed=1, ends=0.1))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces[1].text) == pytest.approx(0.1 * len(text), rel=0.02)
    chinese = tmp_path / "chinese.txt"
    chinese.write_bytes(("的一是不了人我在有他" * 20).encode("gb18030"))
    with pytest.raises(BadInput, match=r"chinese.txt is not UTF-8 text; .*iconv"):
        list(read_pieces([chinese], seed=1))
