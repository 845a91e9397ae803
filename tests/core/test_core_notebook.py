import math
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.tables import html_table


class Reader(HTMLParser):
    """What a browser would show, and the tags it would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
data = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(data)
def test_nothing_in_it_becomes_a_tag(value: object):
    reader = Reader(html_table({"value": value}))
    assert set(reader.tags) <= {"table", "tr", "th", "td"}
    assert not reader.open


def test_text_is_shown_as_it_is():
    assert "".join(Reader(html_table('<script>"&')).shown) == '<script>"&'


def test_a_mapping_is_two_columns_and_a_list_of_them_rows():
    text = html_table({"fits": True, "peak_gib": 1 / 3, "why": [{"a": 1, "b": None}, {"a": 2}]})
    cells = ["fits", "yes", "peak gib", "0.3333", "why", "a", "b", "1", "–", "2", "–"]
    assert [part for part in Reader(text).shown if part.strip()] == cells


def test_a_long_list_is_cut_and_counted():
    assert html_table([1, 2]) == "1, 2"
    assert html_table(list(range(13_356))).endswith("6, 7, … (13,356 in all)")
    assert html_table([math.nan]) == "nan"
