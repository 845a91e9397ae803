"""The site builds without a warning, and the notebook in it runs from top to bottom."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from job_tiny import be_quick, words
from trainfit.cli.main import run
from trainfit.hardware.catalogue import gpus
from trainfit.hardware.model_shapes import model_shapes

sys.path.append(str(Path(__file__).parent / "reports"))
from chromium import browser, find_chromium

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "colab-t4.ipynb"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_page_is_in_a_menu(site: Path):
    menus = "".join(page.read_text() for page in site.glob("*.html"))
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in menus, page


def test_the_api_page_has_every_public_name(site: Path):
    page = (site / "api.html").read_text()
    for name in set(trainfit.__all__) - {"__version__"}:
        assert f'id="trainfit{name.lower()}"' in page, name


def test_the_search_index_has_every_page_and_no_request_is_needed_for_it(site: Path):
    script = (site / "search" / "search_index.js").read_text()
    index = json.loads(script.removeprefix("var __index = "))
    found = {document["location"].partition("#")[0] for document in index["docs"]}
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert pages - {"404.html"} <= found


def test_gpus_have_pages_of_their_own(site: Path):
    listed = (site / "gpus" / "index.html").read_text()
    assert all(f"<code>{spec.slug}</code>" in listed for spec in gpus())
    page = (site / "gpus" / "a100.html").read_text()
    assert "25–30%" in page  # good MFU by the tuning guide
    assert "79.25" in page
    assert "training.batch_size" in page


def test_every_published_model_is_listed(site: Path):
    page = (site / "models.html").read_text()
    for shape in model_shapes():
        row = f"<td><code>{shape.slug}</code></td>\n<td>{shape.hub}</td>\n<td>{shape.parameters:,}"
        assert (row in page) == (shape.hub is not None)


def test_the_site_asks_nobody_for_anything(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert loaded == [], page


LAYOUT = """
(() => {
  const scrolls = node => ['auto', 'scroll'].includes(getComputedStyle(node).overflowX);
  const out = [];
  for (const node of document.querySelectorAll('article *')) {
    const box = node.getBoundingClientRect();
    if (!box.width || getComputedStyle(node).visibility === 'hidden') continue;
    let inside = node;
    while (inside.tagName !== 'BODY' && !scrolls(inside)) inside = inside.parentElement;
    const free = inside.tagName === 'BODY';
    if (free && box.right > innerWidth + 1) out.push(node.outerHTML.slice(0, 80));
  }
  return [document.documentElement.scrollWidth - innerWidth, out];
})()
"""
"""Elements that leave the window and are in nothing that scrolls."""

SEARCH = """
(async () => {
  const input = document.querySelector('.md-search__input');
  input.focus();
  input.value = 'gradient checkpointing';
  input.dispatchEvent(new Event('keyup', {bubbles: true}));
  for (let turn = 0; turn < 100; turn++) {
    await new Promise(done => setTimeout(done, 100));
    const found = [...document.querySelectorAll('.md-search-result__link')];
    if (found.length) return found.map(link => link.href.split('/').pop());
  }
  return [];
})()
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (apt-get install chromium)")
def test_pages_in_a_browser_are_not_clipped_and_can_be_searched(site: Path, tmp_path: Path):
    with browser(tmp_path) as chromium:
        for width, phone in ((1280, False), (390, True)):
            chromium.size(width, 900, phone)
            for page in sorted(site.rglob("*.html")):
                chromium.open(page.as_uri())
                assert chromium.run(LAYOUT) == [0, []], (page.name, width)
        chromium.size(1280, 900)
        chromium.open((site / "index.html").as_uri())
        assert "tuning.html#checkpointing" in " ".join(chromium.run(SEARCH))


# ── the notebook ──────────────────────────────────────────────────────────────────────────────


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text())
    assert found["nbformat"] == 4
    return [cell for cell in found["cells"] if cell["cell_type"] == "code"]


def show(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; returns what it would show."""
    if source.startswith("!"):
        assert run(shlex.split(source[1:].format(**names))[1:]) == 0, source
        return None
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return last and eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)  # noqa: S307


@pytest.mark.soak
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    be_quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    tiny = words(Path("tiny"), "training.max_steps=3", "runs_dir=runs")
    threads = torch.get_num_threads()
    names: dict[str, Any] = {}
    shown = []
    for cell in cells():
        tags = cell["metadata"].get("tags", [])
        source = "".join(cell["source"])
        if "install" in tags:
            assert source.startswith("%pip install")
            continue
        shown.append(show(source, names))
        if "parameters" in tags:
            names["OVERRIDES"] = shlex.join(tiny)
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "Fits" in printed
    assert "report.html" in printed
    pages = [value._repr_html_() for value in shown if value is not None]
    assert pages[0].startswith("<table>")
    assert pages[1].startswith("<iframe")


def test_the_notebook_goes_on_with_a_run_that_was_left(tmp_path: Path):
    [cell] = [cell for cell in cells() if "resume" in cell["metadata"].get("tags", [])]
    names: dict[str, Any] = {"RUNS": tmp_path, "OVERRIDES": "cv.folds=2"}
    show("".join(cell["source"]), names)
    assert names["WORDS"] == f"runs_dir={tmp_path} cv.folds=2"
    for name in ("textclass-1", "textclass-2", "textclass-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "textclass-3" / "results.json").touch()
    show("".join(cell["source"]), names)
    assert names["WORDS"] == f"--resume {tmp_path / 'textclass-2'}"


def test_the_notebook_is_kept_without_output():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells())
