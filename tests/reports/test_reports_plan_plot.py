import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.core.plan_records import MemoryEstimate, Plan
from trainfit.reports.plots import memory_plot, parts_at_peak, write_plot

Make = Callable[..., Plan]
SVG = "{http://www.w3.org/2000/svg}"
PARTS = ("weights", "optimizer", "gradients", "activations", "rest")


@pytest.fixture
def points(make_plan: Make) -> list[tuple[int, MemoryEstimate]]:
    memory = make_plan().memory
    assert memory is not None
    return [
        (
            size,
            replace(
                memory,
                activations_gib=size * 1.0,
                peak_allocated_gib=13.0 + size,
                peak_reserved_gib=13.5 + size,
                fits=13.5 + size <= 23.5,
            ),
        )
        for size in (1, 2, 4, 8, 16)
    ]


def bars(picture: ElementTree.Element) -> list[list[ElementTree.Element]]:
    """The rectangles of each bar, from the bottom up, without the legend's."""
    drawn = [r for r in picture.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    return [drawn[i : i + 5] for i in range(0, len(drawn), 5)]


def scale(picture: ElementTree.Element) -> Callable[[float], float]:
    """GiB of a height in the picture, read off the labels of the axis."""
    lines = [float(e.get("y1", "")) for e in picture.iter(f"{SVG}line") if e.get("class") == "grid"]
    labels = [
        float(e.text or "")
        for e in picture.iter(f"{SVG}text")
        if e.get("class") == "small end" and e.text != "GiB"
    ]
    per_gib = (lines[0] - lines[-1]) / (labels[-1] - labels[0])
    return lambda y: (lines[0] - y) / per_gib


def test_the_picture_shows_the_data(points: list[tuple[int, MemoryEstimate]]):
    picture = ElementTree.fromstring(memory_plot(points, 23.5, 8, "title"))
    gib = scale(picture)
    for bar, (_, memory) in zip(bars(picture), points, strict=True):
        top = gib(float(bar[-1].get("y", "")))
        assert top == pytest.approx(memory.peak_reserved_gib, abs=0.05)
        weights = gib(float(bar[0].get("y", "")))
        assert weights == pytest.approx(memory.weights_gib, abs=0.05)
        assert ("over" in bar[0].get("class", "")) is not memory.fits
    (line,) = [e for e in picture.iter(f"{SVG}line") if e.get("class") == "capacity"]
    assert gib(float(line.get("y1", ""))) == pytest.approx(23.5, abs=0.05)
    (frame,) = [e for e in picture.iter(f"{SVG}rect") if e.get("class") == "chosen"]
    middle = float(frame.get("x", "")) + float(frame.get("width", "")) / 2
    chosen = bars(picture)[3][0]
    assert middle == pytest.approx(
        float(chosen.get("x", "")) + float(chosen.get("width", "")) / 2, abs=0.05
    )


def test_everything_lies_inside_the_picture(points: list[tuple[int, MemoryEstimate]]):
    many = [(n, points[0][1]) for n in range(1, 60)]
    for drawn in (points, points[:1], many):
        picture = ElementTree.fromstring(memory_plot(drawn, 23.5, drawn[0][0], "t"))
        width, height = (float(n) for n in picture.get("viewBox", "").split()[2:])
        for rect in picture.iter(f"{SVG}rect"):
            x, y, w, h = (float(rect.get(k, "0")) for k in ("x", "y", "width", "height"))
            assert min(x, y, w, h) >= 0
            assert x + w <= width
            assert y + h <= height


sizes = st.floats(0, 200)


@given(sizes, sizes, sizes, sizes, sizes, sizes, sizes)
def test_the_parts_add_up_to_the_peak(w, g, o, a, ws, peak, reserve):
    memory = MemoryEstimate(
        weights_gib=w,
        gradients_gib=g,
        optimizer_gib=o,
        activations_gib=a,
        workspace_gib=ws,
        peak_allocated_gib=peak,
        peak_reserved_gib=peak + reserve,
        capacity_gib=80,
        fits=True,
        error_percent=None,
    )
    parts = parts_at_peak(memory)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(peak + reserve)
    assert min(parts.values()) >= 0
    assert parts["gradients"] <= g


@given(title=st.text())
def test_any_title_is_valid_xml(make_plan: Make, title: str):
    memory = make_plan().memory
    assert memory is not None
    picture = ElementTree.fromstring(memory_plot([(1, memory)], 23.5, None, title))
    shown = next(picture.iter(f"{SVG}text")).text or ""
    assert shown == "".join(c if c.isprintable() else " " for c in title)


def test_the_chosen_one_must_be_there(points: list[tuple[int, MemoryEstimate]]):
    with pytest.raises(ValueError, match=r"\[1, 2, 4, 8, 16\]"):
        memory_plot(points, 23.5, 3, "title")


def test_files_by_their_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_plot(tmp_path / "a.SVG", "<svg/>")
    assert (tmp_path / "a.SVG").read_text() == "<svg/>"
    with pytest.raises(BadInput, match=r"a\.jpg.*\.svg or \.png"):
        write_plot(tmp_path / "a.jpg", "<svg/>")
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(BadInput, match="pip install cairosvg"):
        write_plot(tmp_path / "a.png", "<svg/>")
    assert [path.name for path in tmp_path.iterdir()] == ["a.SVG"]


def test_a_png_where_cairosvg_is_there(tmp_path: Path, points: list[tuple[int, MemoryEstimate]]):
    pytest.importorskip("cairosvg", exc_type=ImportError)
    write_plot(tmp_path / "a.png", memory_plot(points, 23.5, 8, "title"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
