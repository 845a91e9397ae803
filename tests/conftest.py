"""Rules for every test: a limit, no GPU or soak test by accident, nothing left in the checkout.

A test that hangs fails after its limit with a stack, and a process that cannot even be interrupted
is ended by faulthandler (see pyproject.toml). Soak tests have a longer limit; with
TRAINFIT_SOAK_MINUTES none is started that could end after that many minutes.

Hypothesis draws the same inputs in every run, so that no run fails by luck. A soak draws new ones:
every test that draws its inputs is a soak test there too.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

collect_ignore = (
    []
    if find_spec("datasets")
    else [f"data/test_data_{name}.py" for name in ("hub", "hub_server", "tagged")]
)
"""Tests of an extra, which a machine with a GPU may lack."""

SOAK_LIMIT = 480.0
"""Seconds for a soak test without a limit of its own."""
_STARTED = time.monotonic()
_ROOT = Path(__file__).parent.parent
_IN_CHECKOUT = pytest.StashKey[set[str]]()

# In the background of a shell Ctrl-C is ignored, and children of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asks the model hub; those of the hub itself start processes with a hub of their own.
os.environ["HF_HUB_OFFLINE"] = "1"

# Once for all: the estimator starts other processes, in seconds, where the path is another.
sys.path.append(str(_ROOT / "benchmarks"))
# Helpers of one folder serve others too, also where only one folder is run.
sys.path += [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]

# A machine that is busy with something else makes no test fail.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True, max_examples=40)
settings.register_profile("soak", _PATIENT, derandomize=False, print_blob=True)
settings.load_profile("soak" if os.environ.get("TRAINFIT_SOAK") else "same")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)  # before -m soak selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    soaking = bool(os.environ.get("TRAINFIT_SOAK"))
    for item in items:
        if soaking and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.soak)
        if item.get_closest_marker("soak"):
            if not soaking:
                item.add_marker(pytest.mark.skip(reason="set TRAINFIT_SOAK=1, or make soak"))
            elif not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SOAK_LIMIT))


def pytest_collection_finish() -> None:
    """Leave modules out of the collections of garbage, each of which would look at all of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what is in the checkout before any fixture of the test."""
    item.stash[_IN_CHECKOUT] = _checkout()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves something in the checkout (with -n, tests beside it too)."""
    yield
    left = _checkout() - item.stash[_IN_CHECKOUT]
    assert not left, f"a test wrote {', '.join(sorted(left))}: give it runs_dir, or another folder"


def _checkout() -> set[str]:
    """Names in the checkout and in its runs/, but for the caches of tools and the GPU's record."""
    names = {entry.name for entry in os.scandir(_ROOT) if not entry.name.startswith(".")}
    runs = {f"runs/{entry.name}" for entry in os.scandir(_ROOT / "runs")} if "runs" in names else ()
    return names.union(runs) - {"runs", "runs/test-gpu.json"}


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = os.environ.get("TRAINFIT_SOAK_MINUTES")
    limit = item.get_closest_marker("timeout")
    if minutes and limit and item.get_closest_marker("soak"):
        ends = time.monotonic() - _STARTED + float(limit.args[0])
        if ends > 60 * float(minutes):
            pytest.skip("no time left in this part of the soak tests")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures of a module too, which come before those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_timed() -> Iterator[None]:
    """On any CPU the planner finds fp32 faster, by as much as is written here."""
    from trainfit.jobs import job_plan
    from trainfit.planning import cpu_choice

    def times(asked: str) -> cpu_choice.StepTimes:
        counts = cpu_choice.StepRequest.from_json(asked).threads
        found = (
            cpu_choice.StepTime(precision=precision, threads=count, seconds=seconds / count)
            for precision, seconds in (("fp32", 0.010), ("bf16", 0.016))
            for count in counts
        )
        return cpu_choice.StepTimes(times=tuple(found))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_choice, "time_steps", times)
        for module in (cpu_choice, job_plan):
            patch.setattr(module, "start_ahead", lambda **_options: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_lines_of_stages() -> Iterator[None]:
    """Say nothing about stages: their lines have a test, and others count the lines of errors."""
    from trainfit.reports import terminal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "busy", lambda _what: nullcontext())
        yield


@pytest.fixture
def tiny_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that `check` plans for is one that is planned in no time."""
    from trainfit.jobs import tuned_plans

    words = ("model.name=modernbert-tiny", "model.method=full", "data.max_length=64")
    monkeypatch.setattr(tuned_plans, "OVERRIDES", words)
