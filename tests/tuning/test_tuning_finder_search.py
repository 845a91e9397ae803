"""The search for the largest micro-batch, on a simulated GPU whose true maximum is known."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfit.core.errors import RunFailed
from trainfit.planning.estimator.allocator import Event, replay
from trainfit.planning.estimator.estimate import Room
from trainfit.tuning.growth import (
    GIB,
    Measured,
    Peak,
    RowRange,
    Search,
    knee,
    law,
    most_rows,
    predicted_peak,
    search,
    small_sizes,
)

MIB = 1 << 20


@dataclass(frozen=True)
class Made:
    """A training step by its allocations: what stays, what layers keep, and what they borrow."""

    held: tuple[int, ...]
    kept: tuple[float, ...]
    """Bytes per row that each layer keeps for the backward pass."""
    borrowed: tuple[float, ...]
    """Bytes per row that each layer needs while it runs."""
    fixed: int
    """Borrowed by the update, whatever the rows."""

    def events(self, rows: int) -> list[Event]:
        """Two steps, so that the second meets the first one's cache."""
        log = [(name, size) for name, size in enumerate(self.held)]
        for step in range(2):
            base = 1000 * (step + 1)
            for layer, (kept, borrowed) in enumerate(zip(self.kept, self.borrowed, strict=True)):
                log += [
                    (base + 500 + layer, int(borrowed * rows)),
                    (base + layer, int(kept * rows)),
                ]
                log.append((base + 500 + layer, -1))
            for layer in reversed(range(len(self.kept))):
                log.append((base + 700 + layer, int(self.borrowed[layer] * rows)))
                log += [(base + layer, -1), (base + 700 + layer, -1)]
            log += [(base + 900, self.fixed), (base + 900, -1)]
        return log


class Gpu:
    """A GPU of so much memory, on which the step runs."""

    def __init__(self, made: Made, capacity: int) -> None:
        self.made, self.capacity, self.runs = made, capacity, []

    def fits(self, rows: int) -> bool:
        return replay(self.made.events(rows), self.capacity).fits

    def measure(self, rows: int) -> Measured | None:
        self.runs.append(rows)
        took = replay(self.made.events(rows), self.capacity)
        if not took.fits:
            return None
        return Measured(
            rows=rows,
            held=sum(self.made.held),
            allocated=took.peak_allocated,
            reserved=took.peak_reserved,
            seconds=0.01 + 0.002 * rows,
        )

    def true_maximum(self) -> int:
        low, high = 0, 1
        while self.fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        # A few rows more may fit again, where their pieces fit each other by chance.
        return max(filter(self.fits, range(low, int(1.1 * low) + 2)), default=0)


def predictor(made: Made, capacity: int):
    """What the planner's child says of the step that it believes in."""
    sizes = [int(capacity * share / 100) for share in range(88, 111, 2)]

    def predict(rows: int) -> Peak:
        events = made.events(rows)
        free = replay(events)
        rooms = [
            Room(
                workspace=0,
                activations=0,
                peak_allocated=free.peak_allocated,
                peak_reserved=free.peak_reserved,
                fits=free.peak_reserved <= size or replay(events, size).fits,
            )
            for size in sizes
        ]
        return predicted_peak(rooms, sizes)

    return predict


def steps() -> st.SearchStrategy[Made]:
    """Like blocks, one after the other, and a head that borrows more: the shape of a GPT's step."""

    def made(blocks, kept, borrowed, head, held, fixed):
        return Made(
            held=tuple(held),
            kept=(*(tuple(kept) * blocks), kept[0]),
            borrowed=(*((borrowed,) * (len(kept) * blocks)), head),
            fixed=fixed,
        )

    return st.builds(
        made,
        blocks=st.integers(2, 6),
        kept=st.lists(st.floats(1.5 * MIB, 20 * MIB), min_size=1, max_size=3),
        borrowed=st.floats(1.5 * MIB, 10 * MIB),
        head=st.floats(5 * MIB, 60 * MIB),
        held=st.lists(st.integers(MIB // 2, 300 * MIB), min_size=1, max_size=8),
        fixed=st.integers(0, 100 * MIB),
    )


# With 3% less in each piece, the cache given back makes room for 62 rows; in truth, for not one.
HARDLY_FITS = Made(
    held=(524288,),
    kept=(1572864, 4979045, 1572864, 4979045, 1572864),
    borrowed=(4856563, 4856563, 4856563, 4856563, 10939199),
    fixed=0,
)
# Every second number of rows fits its pieces without a gap.
JUMPS = Made(
    held=(524288,),
    kept=(5235113, 5235113, 5235113),
    borrowed=(5227230, 5227230, 5242880),
    fixed=0,
)


def near(found: int, truth: int) -> bool:
    return abs(found - truth) <= max(1, 0.05 * truth)


def looked_for(made: Made, rows: int, wrong: float) -> tuple[Search, int, Gpu]:
    """Search on a GPU for about so many rows, with a prediction that is `wrong` by a share."""
    capacity = max(GIB, replay(made.events(rows)).peak_allocated + 16 * MIB)
    gpu = Gpu(made, capacity)
    kept = tuple(size * (1 + wrong) for size in made.kept)
    believed = Made(held=made.held, kept=kept, borrowed=made.borrowed, fixed=made.fixed)
    found = Search(
        room=lambda: capacity,
        asked=RowRange(),
        predict=predictor(believed, capacity),
        measure=gpu.measure,
    )
    return found, search(found), gpu


@given(made=steps(), rows=st.integers(8, 200), wrong=st.floats(-0.04, 0.04) | st.just(0.0))
@example(made=HARDLY_FITS, rows=62, wrong=-0.03125)
@example(made=JUMPS, rows=150, wrong=0.0)
@settings(max_examples=100)
def test_a_prediction_that_is_a_little_wrong_is_put_right_and_nothing_runs_out(made, rows, wrong):
    found, largest, gpu = looked_for(made, rows, wrong)
    truth = gpu.true_maximum()
    assert len(gpu.runs) <= 4
    # Where the allocator lives off its pieces, a few bytes decide: those are the wider bounds.
    sure = next(rows for rows in itertools.count(found.ran) if not gpu.fits(rows + 1))
    assert 0.85 * sure - 1 <= largest <= 1.1 * truth + 1
    assert found.ran >= max(1, int(0.9 * largest))
    # The fourth probe alone may run out: it is of the size that is about to be recommended.
    assert found.ran_out is None or found.ran_out == gpu.runs[3] > largest
    assert all(run < max(0.97 * truth, 30) for run in gpu.runs[:3])


def test_most_answers_are_within_five_percent_of_the_truth():
    draw = random.Random(0)
    right = 0
    for _ in range(150):
        blocks, kinds = draw.randint(2, 6), draw.randint(1, 3)
        kept = tuple(draw.uniform(1.5, 20) * MIB for _ in range(kinds)) * blocks
        borrowed = (draw.uniform(1.5, 10) * MIB,) * len(kept)
        made = Made(
            held=tuple(draw.randint(MIB // 2, 300 * MIB) for _ in range(draw.randint(1, 8))),
            kept=(*kept, kept[0]),
            borrowed=(*borrowed, draw.uniform(5, 60) * MIB),
            fixed=draw.randint(0, 100 * MIB),
        )
        _, largest, gpu = looked_for(made, draw.randint(8, 200), draw.uniform(-0.04, 0.04))
        right += near(largest, gpu.true_maximum())
    assert right >= 148


# Few rows take what the update takes: they lie on a line by the allocator's pieces alone.
LARGE_UPDATE = Made(
    held=(524288,),
    kept=(1572864.0, 1572864.0, 1572864.0),
    borrowed=(1572864.0, 1572864.0, 5242880.0),
    fixed=44040193,
)


@given(made=steps(), rows=st.integers(1, 300))
@example(made=LARGE_UPDATE, rows=1)
@settings(max_examples=60)
def test_without_a_prediction_small_probes_keep_below_the_maximum(made, rows):
    capacity = max(2 * GIB, int(1.2 * replay(made.events(rows)).peak_reserved))
    gpu = Gpu(made, capacity)
    found = Search(room=lambda: capacity, asked=RowRange(), predict=None, measure=gpu.measure)
    largest = search(found)
    assert len(gpu.runs) <= 4
    assert 1 <= largest <= 1.1 * gpu.true_maximum() + 1
    assert found.ran >= max(1, int(0.9 * largest))


def test_a_prediction_that_is_far_off_is_not_confirmed_near_the_limit():
    made = Made(held=(200 * MIB,), kept=(20.0 * MIB,) * 6, borrowed=(5.0 * MIB,) * 6, fixed=0)
    believed = Made(held=(200 * MIB,), kept=(14.0 * MIB,) * 6, borrowed=(5.0 * MIB,) * 6, fixed=0)
    capacity = 8 * GIB
    gpu = Gpu(made, capacity)
    found = Search(
        room=lambda: capacity,
        asked=RowRange(),
        predict=predictor(believed, capacity),
        measure=gpu.measure,
    )
    largest = search(found)
    truth = gpu.true_maximum()
    assert found.ran_out is None
    assert max(gpu.runs[:3]) <= 0.6 * truth
    assert gpu.runs[3:] == [int(0.9 * largest)]
    assert near(largest, truth)


def test_what_others_use_is_not_counted_on():
    made = Made(held=(100 * MIB,), kept=(10.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)

    def largest(room: int) -> int:
        gpu = Gpu(made, room)
        predict = predictor(made, room)
        return search(
            Search(room=lambda: room, asked=RowRange(), predict=predict, measure=gpu.measure)
        )

    alone, beside = largest(8 * GIB), largest(5 * GIB)
    assert beside < alone
    assert near(beside, Gpu(made, 5 * GIB).true_maximum())


def test_memory_that_shrinks_meanwhile_shrinks_the_answer():
    made = Made(held=(100 * MIB,), kept=(10.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)
    gpu = Gpu(made, 6 * GIB)
    found = Search(
        room=lambda: 8 * GIB if len(gpu.runs) < 2 else 6 * GIB,
        asked=RowRange(),
        predict=predictor(made, 8 * GIB),
        measure=gpu.measure,
    )
    assert near(search(found), gpu.true_maximum())
    assert found.ran_out is None


def test_a_probe_that_runs_out_after_all_bounds_the_answer():
    made = Made(held=(100 * MIB,), kept=(10.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)
    gpu = Gpu(made, 8 * GIB)

    def fails_late(rows: int) -> Measured | None:
        return None if rows > 60 else gpu.measure(rows)

    found = Search(
        room=lambda: 8 * GIB,
        asked=RowRange(),
        predict=predictor(made, 8 * GIB),
        measure=fails_late,
    )
    largest = search(found)
    assert found.ran_out is not None
    assert int(0.9 * largest) <= found.ran <= 60


@pytest.mark.parametrize("predicted", [False, True])
def test_nothing_is_answered_where_nothing_ran(predicted):
    made = Made(held=(100 * MIB,), kept=(10.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)
    found = Search(
        room=lambda: GIB,
        asked=RowRange(),
        predict=predictor(made, GIB) if predicted else None,
        measure=lambda _rows: None,
    )
    with pytest.raises(RunFailed, match="1 row does not fit: it takes more and "):
        search(found)


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_what_is_recommended_ran_for_any_margin(share):
    made = Made(held=(100 * MIB,), kept=(10.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)
    gpu, asked = Gpu(made, 8 * GIB), RowRange(share=share)
    found = Search(
        room=lambda: 8 * GIB,
        asked=asked,
        predict=predictor(made, 8 * GIB),
        measure=gpu.measure,
    )
    largest = search(found)
    assert asked.recommended(largest) <= found.ran <= gpu.true_maximum()
    assert near(largest, gpu.true_maximum())


def test_a_step_that_does_not_fit_at_all_is_said_in_one_line():
    made = Made(held=(900 * MIB,), kept=(200.0 * MIB,) * 4, borrowed=(4.0 * MIB,) * 4, fixed=0)
    gpu = Gpu(made, GIB)
    found = Search(
        room=lambda: GIB, asked=RowRange(), predict=predictor(made, GIB), measure=gpu.measure
    )
    with pytest.raises(RunFailed, match="1 row does not fit") as raised:
        search(found)
    assert "\n" not in str(raised.value)
    assert "1.00 GiB are free" in str(raised.value)
    assert gpu.runs == []


@given(
    fixed=st.floats(0, 100),
    slope=st.floats(0.01, 10),
    room=st.floats(50, 5000),
    bend=st.integers(1, 400),
    at_most=st.integers(1, 2000),
)
def test_the_end_of_a_line_that_bends_down_is_found_with_few_questions(
    fixed, slope, room, bend, at_most
):
    asked: dict[int, float] = {}

    def slack(rows: int) -> float:
        asked[rows] = room - fixed - slope * rows - slope * max(0, rows - bend)
        return asked[rows]

    truth = max((r for r in range(1, at_most + 1) if slack(r) >= 0), default=0)
    asked.clear()
    found = most_rows(slack, 1, at_most)
    assert found <= truth
    assert truth - found <= truth / 64
    assert len(asked) <= 20


def test_small_probes_keep_far_below_what_is_expected_to_fit():
    assert small_sizes(137, RowRange()) == [17, 34]
    assert small_sizes(5, RowRange()) == [1, 2]
    assert small_sizes(2, RowRange()) == [1]
    assert small_sizes(1, RowRange()) == []
    assert small_sizes(100, RowRange(at_least=40)) == [40, 41]


@given(
    start=st.floats(1e-4, 1), each=st.floats(1e-4, 1), most=st.integers(1, 500), first=st.just(1)
)
def test_the_knee_is_the_first_within_two_percent(start, each, most, first):
    probes = [
        Measured(rows=r, held=0, allocated=0, reserved=0, seconds=start + each * r)
        for r in (1, 7, 31)
    ]
    found = knee(probes, first, most)
    assert found is not None

    def rate(rows: int) -> float:
        return rows / (start + each * rows)

    near_enough = [r for r in range(1, most + 1) if rate(r) >= 0.98 * rate(most) * (1 - 1e-9)]
    assert abs(found - near_enough[0]) <= 1
    assert rate(found) >= 0.98 * rate(most) * (1 - 1e-6)


def test_one_probe_tells_no_knee():
    assert knee([Measured(rows=1, held=0, allocated=0, reserved=0, seconds=1)], 1, 9) is None


@given(fixed=st.floats(-10, 10), each=st.floats(-10, 10))
def test_a_line_is_found_again(fixed, each):
    found = law([(x, fixed + each * x) for x in (1, 2, 5)])
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(found, (fixed, each), strict=True))
