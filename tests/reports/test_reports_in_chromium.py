"""The page in a real browser: drawn whole, in silence, and without a network."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import Browser, browser, find_chromium
from report_runs import write_run
from test_reports_page import EVIL, write_study

from trainfit.core.plan_records import Plan
from trainfit.reports.run_report import report, write

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="needs Chromium (apt-get install chromium)"
)
Make = Callable[..., Plan]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_plan: Make) -> Path:
    root = tmp_path_factory.mktemp("pages")
    plan = make_plan(gpu="rtx-4090")
    folders = [
        write_run(root / "nli-1", plan, name=EVIL),
        write_run(root / "nli-2", plan, seed=1, classes=("a", "b", EVIL)),
        write_study(root / "study"),
    ]
    return write(report(*folders), root / "page.html")


FIGURES = """
[...document.querySelectorAll('figure')].map(figure => {
  const area = figure.querySelector('.area, .rows, .whole, table').getBoundingClientRect();
  const lines = [...figure.querySelectorAll('path.series, path.trial')];
  const ink = lines.map(path => path.getTotalLength());
  const marks = figure.querySelectorAll('.dot, .bar, .whole i, td').length;
  return [figure.id, area.width > 60 && area.height > 15,
          lines.length ? Math.max(...ink) > 100 : marks > 0];
})
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1240, 390])
def test_it_opens_in_silence_with_every_plot_drawn(
    chromium: Browser, page: Path, width: int, scheme: str
):
    chromium.size(width, 900, phone=width < 600)
    chromium.look(scheme=scheme)
    chromium.open(page.as_uri())
    assert chromium.complaints() == []
    assert chromium.requests() == [page.as_uri()]
    drawn = chromium.run(FIGURES)
    assert len(drawn) > 40
    assert [name for name, there, ink in drawn if not (there and ink)] == []
    assert chromium.run("document.documentElement.scrollWidth") == width  # nothing sticks out
    dark = chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 25)"
    assert dark == (scheme == "dark")


def test_text_of_others_stays_text(chromium: Browser, page: Path):
    chromium.open(page.as_uri())
    assert chromium.run("document.images.length") == 0
    assert EVIL in chromium.run("document.body.textContent")


def test_a_pointer_shows_the_numbers_and_the_event_under_it(chromium: Browser, page: Path):
    chromium.size(1240, 900)
    chromium.open(page.as_uri())
    where = """(() => {
      const area = document.querySelector('#run-1-loss .area');
      area.scrollIntoView();
      const box = area.getBoundingClientRect();
      return [box.left + box.width / 3, box.top + 40];
    })()"""
    x, y = chromium.run(where)  # a third of 600 steps: 200, where memory ran out
    chromium.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = chromium.run("document.getElementById('tip').textContent")
    assert "step 200" in tip
    assert "oom at 200: cut into 4 micro-batches" in tip


def test_the_legend_hides_a_line_and_the_button_changes_the_theme(chromium: Browser, page: Path):
    chromium.look(scheme="light")
    chromium.open(page.as_uri())
    click = "document.querySelector('#comparison .legend button').click()"
    shown = "document.querySelectorAll('#comparison path.off').length"
    chromium.run(click)
    assert chromium.run(shown) > 0
    chromium.run(click)
    assert chromium.run(shown) == 0
    chromium.run("document.getElementById('theme').click()")
    chromium.run("document.getElementById('theme').click()")
    assert chromium.run("document.documentElement.dataset.theme") == "dark"
    chromium.run("localStorage.clear()")


def test_it_prints_in_black_on_white(chromium: Browser, page: Path, tmp_path: Path):
    chromium.look(scheme="dark", media="print")
    chromium.open(page.as_uri())
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    chromium.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    chromium.look()


def test_a_hundred_thousand_steps_open_in_under_two_seconds(chromium: Browser, long_page: Path):
    chromium.size(1240, 900)
    assert min(chromium.open(long_page.as_uri()) for _ in range(3)) < 2
    assert chromium.complaints() == []
    assert all(ink for _, _, ink in chromium.run(FIGURES))
