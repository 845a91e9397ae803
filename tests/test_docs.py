"""The commands and links that README and docs show are real."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from job_tiny import write_redsm5
from tokenizer_folders import tokenizer_folder
from trainfit.cli.main import COMMANDS, run

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def files(page: str) -> list[tuple[str, str]]:
    """Blocks with a title are files that the page's other blocks import."""
    [path] = [path for path in PAGES if path.name == page]
    found: list[tuple[str, str]] = re.findall(
        r'```python title="([\w.]+)"\n(.*?)```', path.read_text(), re.DOTALL
    )
    return found


SHOWN = [
    (page.name, line.split("  #")[0].strip())
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("trainfit ")
]


SLOW = {
    "write-a-job.md",
    "batch-size.md",
    "models.md",
    "trainfit plan nli --gpu t4 --model bert-base model.method=full --json",
    "trainfit plan gpt --gpu a30 --model gpt-small",
    "trainfit plan textclass --gpu rtx_4090 model.name=qwen2.5-7b model.method=qlora",
    "trainfit plan nli --gpu 4090 --model bert-base model.method=full training.batch_size=20",
    "trainfit plan nli --gpu 4090 --memory 8 --model mistral-7b model.method=lora"
    " data.max_length=256",
    "trainfit train textclass model.name=modernbert-tiny model.method=lora"
    " model.quantization=int8 training.max_steps=4",
}
"""Pages with scripts, and commands, that plan or train for many seconds."""


def params(shown: list[tuple[str, str]]) -> list[Any]:
    """What is slow runs with `make soak`."""
    return [
        pytest.param(*each, marks=[pytest.mark.soak] if SLOW & set(each) else []) for each in shown
    ]


@pytest.mark.usefixtures("tiny_default")
@pytest.mark.parametrize(("page", "line"), params(SHOWN))
def test_a_shown_command_runs(
    page: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)  # some train
    assert run(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_commands_are_shown_at_all():
    assert len(SHOWN) > 10
    assert all((ROOT / "docs" / f"{name}.md").exists() for name in COMMANDS)


SESSIONS = [
    (page.name, block)
    for page in PAGES
    for block in blocks(page, "console")
    if "$ trainfit" in block
]


@pytest.mark.parametrize(("page", "block"), SESSIONS)
def test_a_shown_answer_is_the_real_one(page: str, block: str, capsys: pytest.CaptureFixture[str]):
    command, _, answer = block.partition("\n")
    run(shlex.split(command)[2:])
    captured = capsys.readouterr()
    assert captured.out + captured.err == answer


PYTHON = [(page.name, block) for page in PAGES for block in blocks(page, "python")]
ON_REDSM5 = [(page, block) for page, block in PYTHON if "data/redsm5" in block]
"""Scripts that need the data and a model's tokenizer in the working folder."""


@pytest.mark.soak
@pytest.mark.parametrize(("page", "block"), ON_REDSM5)
def test_shown_python_runs_on_redsm5_files(page: str, block: str, tmp_path: Path):
    write_redsm5(tmp_path / "data" / "redsm5", posts=100)
    tokenizer_folder(tmp_path / "google" / "gemma-2-2b", "gemma")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert page == "hardware-optimizer.md"
    assert "DataLoader over 50 batches:" in done.stdout
    assert "ms per batch" in done.stdout


@pytest.mark.usefixtures("tiny_default")
@pytest.mark.parametrize(
    ("page", "block"), params([each for each in PYTHON if each not in ON_REDSM5])
)
def test_shown_python_runs(
    page: str,
    block: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    from trainfit import undo
    from trainfit.runtime import switches

    for name, text in files(page):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {})
    while switches._in_force:
        undo(switches._in_force[-1][0])


GENERATED = {"docs/api.md", "docs/colab-t4.md", "docs/gpus/index.md"}
"""Pages that exist on the site alone; its build checks links to them."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        path = page.parent / target
        known = "://" in target or path.exists() or str(path.relative_to(ROOT)) in GENERATED
        assert known, target


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / "src/trainfit" / name).exists()) == []


def test_rooms_of_the_architecture_are_the_packages():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = set(re.findall(r"\(\.\./src/trainfit/([\w/]+)/\)", text))
    packages = {path.parent.name for path in (ROOT / "src/trainfit").glob("*/__init__.py")}
    assert rooms - {"planning/estimator"} == packages


def test_the_sizes_in_the_architecture_are_true():
    text = (ROOT / "docs" / "architecture.md").read_text()
    after = dict(re.findall(r"^\| ([^|]+) \| [^|]* \| ([\d,]+)", text, re.MULTILINE))
    said = {name.strip(): int(number.replace(",", "")) for name, number in after.items()}
    files = list((ROOT / "src").rglob("*.py"))
    lines = [len(path.read_text().splitlines()) for path in files]
    assert said["files"] == len(files)
    assert said["lines"] == pytest.approx(sum(lines), abs=500)
    assert said["files over 400 lines"] == sum(count > 400 for count in lines)
    names = [path.name for path in files if path.name != "__init__.py"]
    assert said["file names that occur twice"] == len(names) - len(set(names))
    walks = re.split(r"^\*\*`trainfit \w+ nli", text, flags=re.MULTILINE)[1:]
    train, plan, tune = (re.findall(r"`(\w+/[\w/]+\.py)`", walk.split("\n\n")[1]) for walk in walks)
    assert [len(train), len(plan), len(tune)] == [17 + 6, 20 + 2, 10]
    assert said["files in the walk of `train nli` (below)"] == 17
    assert said["files in the walk of `plan nli --gpu t4`"] == 20
    assert said["files in the walk of `tune nli`"] == 10
