"""Ranks that differ are told apart before anything is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_children import context
from engine_ranks import on_ranks

from job_tiny import nli_words
from plan_example import PLAN
from trainfit.cli import main
from trainfit.conf import Composed, compose
from trainfit.core.errors import BadInput
from trainfit.engine.distributed import joined
from trainfit.jobs.job_times import batch_note
from trainfit.jobs.run import check_ranks_agree, difference


def test_the_first_difference_is_named_with_its_rank() -> None:
    same = {"seed": 1, "the data": "a", "data.train": "a path"}
    assert difference([same, same, same]) is None
    assert difference([same, same, same | {"seed": 2}]) == (
        "ranks differ in seed: 1 on rank 0, 2 on rank 2"
    )
    assert (
        difference([same, same | {"the data": "b"}]) == "the data of rank 1 is not that of rank 0"
    )
    assert difference([same, {**same, "more": None, "new": 3}]) == (
        "ranks differ in new: null on rank 0, 3 on rank 1"
    )


def disagree(rank: int, folder: Path) -> None:
    other = folder / str(rank)
    other.mkdir()
    words = [f"runs_dir={other}", *(["training.learning_rate=0.5"] if rank else [])]
    prepared = SimpleNamespace(
        composed=compose("nli", words), facts=lambda: {"checksum": "the same"}
    )
    with joined("cpu") as (world, _):
        check_ranks_agree(world, SimpleNamespace(**vars(prepared) | {"composed": _alike(folder)}))
        with pytest.raises(BadInput, match=r"training.learning_rate: .* on rank 0, 0.5 on rank 1"):
            check_ranks_agree(world, prepared)


def _alike(folder: Path) -> Composed:
    return compose("nli", [f"runs_dir={folder}"])


@pytest.fixture(scope="module")
def children() -> ForkServerContext:
    return context()


@pytest.mark.soak
def test_every_rank_says_in_what_they_differ(tmp_path: Path, children: ForkServerContext) -> None:
    assert on_ranks(children, 2, disagree, tmp_path) == [0, 0]


def test_a_batch_size_per_rank_is_said_where_it_changes_the_step() -> None:
    per_rank = compose("nli", ["training.batch_size=8"])
    whole = compose("nli", ["training.batch_size=8", "training.effective_batch_size=16"])
    two = replace(PLAN, ranks=2, effective_batch_size=16)
    note = batch_note(per_rank, two)
    assert note is not None
    assert "2 ranks make steps of 16 sequences, where one rank makes them of 8" in note
    assert batch_note(whole, two) is None
    assert batch_note(per_rank, replace(PLAN, ranks=1)) is None


def test_ranks_of_a_machine_say_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv(
            "TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / str(rank) / "error.json")
        )
        assert main.run(["train", "nli", "sede=3"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == ["trainfit: unknown key sede for nli"]
    assert main.run(["train", "nli", "sed=3"]) == 2  # another error is said
    assert capsys.readouterr().err


@pytest.mark.soak
def test_under_torchrun_a_rank_with_another_learning_rate_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "from trainfit.cli.main import run\n"
        "more = ['training.learning_rate=0.01'] * (os.environ['RANK'] == '1')\n"
        "sys.exit(run([*sys.argv[1:], *more]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), "train", "nli", *nli_words(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = [line for line in done.stderr.splitlines() if "ranks differ" in line]
    assert len(lines) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not any((tmp_path / "runs").glob("*/plan.json"))
