"""A run with any of its files damaged: every command answers in a line, or does without it."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gpt_tiny
import job_tiny
from trainfit.cli.main import run
from trainfit.engine.session import Session

READERS = (
    ["report", "RUN", "--json"],
    ["watch", "RUN", "--json"],
    ["verify", "RUN", "--json"],
    ["doctor", "--run", "RUN"],
    ["report", "RUN", "--format", "markdown"],
)
JOBS = {
    "textclass": ["predict", "RUN", "--text", "alder birch"],
    "gpt": ["sample", "RUN", "--tokens", "2"],
}


@pytest.fixture(scope="module", params=list(JOBS))
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A finished run of a job, made once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tmp = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        (gpt_tiny if request.param == "gpt" else job_tiny).be_quick(patch)
        if request.param == "gpt":
            words = gpt_tiny.gpt_words(tmp)
        else:
            texts = job_tiny.write_texts(tmp / "texts.csv", 80)
            words = job_tiny.words(tmp, f"data.train={texts}", "data.max_length=16")
        assert run(["train", request.param, *words]) == 0
        [folder] = (tmp / "runs").iterdir()
        yield request.param, folder
    torch.set_num_threads(threads)


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes()) or bytearray(b"x")
    for _ in range(8):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size or 1)])


def _instead(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, _draw: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES = (
    _flip,
    _cut,
    lambda path, _draw: path.write_text("[[[1, 2], {}], null]"),
    lambda path, _draw: path.write_text('{"gpus": 3, "folds": {}, "status": [], "step": 1e400}'),
    _instead(Path.mkdir),
    _instead(os.mkfifo),
    _instead(lambda path: path.symlink_to(path.name)),
    _instead(lambda path: path.symlink_to("/dev/zero")),
)


def refused_or_done(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    code = run(words)
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert "Traceback" not in said
    assert code in (0, 1, 2)
    assert code == 0 or said.strip()
    return code


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_readers_do_without_any_file(
    job: tuple[str, Path], rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _task, whole = job
    draw = random.Random(3)
    files = sorted(path.relative_to(whole) for path in whole.iterdir() if path.is_file())
    assert len(files) > 8
    for at, name in enumerate(files * rounds):
        folder = shutil.copytree(whole, tmp_path / f"run-{at}")
        DAMAGES[(at * 3 + at // len(files)) % len(DAMAGES)](folder / name, draw)
        words = READERS[at % len(READERS)]
        refused_or_done([str(folder) if w == "RUN" else w for w in words], capsys)


def test_a_damaged_export_is_refused(
    job: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, whole = job
    draw = random.Random(4)
    found = [p for p in (whole / "export").rglob("*") if p.is_file()]
    files = sorted(p.relative_to(whole) for p in found if p.suffix != ".md")  # nothing loads a card
    for at, name in enumerate(files):
        folder = shutil.copytree(whole, tmp_path / f"run-{at}")
        DAMAGES[at % len(DAMAGES)](folder / name, draw)
        words = [str(folder) if w == "RUN" else w for w in JOBS[task]]
        assert refused_or_done(words, capsys) == 2, name


@pytest.mark.parametrize("number", range(3))
def test_a_run_goes_on_or_is_refused(
    job: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    task, whole = job
    draw = random.Random(number)
    folder = shutil.copytree(whole, tmp_path / "run")
    for name in ("results.json", "scores.json"):
        (folder / name).unlink(missing_ok=True)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "export" not in p.parts)
    DAMAGES[number](draw.choice(files), draw)
    if refused_or_done(["train", task, "--resume", str(folder)], capsys) == 0:
        assert (folder / "results.json").is_file()


def test_a_model_that_is_not_finite_is_no_success(
    job: tuple[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, whole = job
    rates = property(lambda session: [1e39] * len(session.parts.rates))  # no float32 holds it
    monkeypatch.setattr(Session, "rates", rates)
    folder = shutil.copytree(whole, tmp_path / "run")
    for name in ("results.json", "scores.json", "result.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("checkpoints", "export"):
        shutil.rmtree(folder / name)
    assert run(["train", task, "--resume", str(folder)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "is not finite after step" in said[-1]
    assert "lower the learning rate" in said[-1]
    assert not (folder / "results.json").exists()
    assert not (folder / "export").exists()
