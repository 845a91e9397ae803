import math
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from plan_example import PLAN
from trainfit.core.files import html_table
from trainfit.core.records import Event
from trainfit.hpo.outcome import StudyResult
from trainfit.jobs.scores import JobResult
from trainfit.tuning.tuned_cache import Interval, TuneResult


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


def test_results_print_as_a_few_lines():
    events = (Event(kind="oom", step=1, seconds=1.0, text="x" * 200),) * 100
    job = JobResult(
        task="nli",
        run="runs/nli-1",
        status="finished",
        metrics={"f1": 2 / 3, "count": 96, "confusion": [[1, 2], [3, 4]]},
        baselines={},
        events=events,
        seconds=1.0,
    )
    assert repr(job) == "nli finished: runs/nli-1\nf1     0.6667\ncount  96"
    one = Interval(value=10.0, low=9.0, high=11.0)
    tuned = TuneResult(
        best=PLAN,
        trials=(),
        seconds=180.0,
        changes={"compile": True},
        samples_per_second=replace(one, value=12.0),
        planned_samples_per_second=one,
    )
    assert repr(tuned) == "0 trials in 180 s: 1.20 times the planned speed\ncompile  yes"
    study = StudyResult(study="a", best=None, trials={"complete": 3}, seconds=1.0)
    assert repr(study) == "Study a\ncomplete  3"
    lines = repr(PLAN).splitlines()
    assert lines[0] == PLAN.verdict()
    assert [line.split()[0] for line in lines[1:]] == [one.setting for one in PLAN.reasons]
    assert max(map(len, lines)) <= 100
