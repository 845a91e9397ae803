"""The wheel holds every file of the package, and runs in a fresh environment off the checkout."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
compat: Any = importlib.import_module("compat")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = compat.build_wheel(tmp_path_factory.mktemp("dist"))
    return made


@pytest.mark.soak
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "src"], cwd=ROOT, text=True
    )
    package = {line.removeprefix("src/") for line in listed.splitlines() if (ROOT / line).exists()}
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    assert held == package
    assert {Path(name).suffix for name in held} >= {
        ".yaml",
        ".csv",
        ".json",
        ".j2",
        ".html",
        ".css",
    }


@pytest.mark.soak
def test_links_of_the_description_lead_away_from_the_package_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith("METADATA")]
        found = Parser().parsestr(file.read(name).decode())
    links = re.findall(r"\]\(([^)]+)\)", str(found.get_payload()))
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)


@pytest.mark.soak
def test_the_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    python = compat.make_environment(tmp_path / "venv", [str(wheel)])
    work = tmp_path / "work"
    compat.prepare(work)
    where = [str(python), "-c", "import trainfit; print(trainfit.__file__)"]
    place = subprocess.check_output(where, cwd=work, env={}, text=True)
    assert Path(place).is_relative_to(tmp_path / "venv")
    checked = compat.run(python, ("check", "--json"), work)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["recommended"]
    for name in ("plan", "train", "predict"):
        found = compat.check(python, work, name)
        assert found["exit_code"] == 0, found


def test_versions_that_are_tried_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["hpo"]]
    lowest = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(needs)))
    for name in ("transformers", "peft", "optuna", "tokenizers"):
        assert compat.ENVIRONMENTS["lowest"][name].startswith(lowest[name]), name
