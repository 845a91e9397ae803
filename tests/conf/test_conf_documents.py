"""Every preset, experiment and override of the documents, planned and dry-run by the command.

Here the estimator answers every question with the same small step, so that thousands of plans take
seconds: what is shown is that nothing is refused that should work, and that what is set is kept.
The soak tests ask the estimator itself, at the models' real shapes.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conf_documents import BLOCKS, COMMANDS, SHOWN

from trainfit.cli.main import run
from trainfit.conf import Composed, compose, composition, options
from trainfit.conf.starting import with_file
from trainfit.core import caches
from trainfit.core.plan_records import Precision
from trainfit.core.records import HardwareProfile
from trainfit.data.tokens import Dataset, Tokens
from trainfit.hardware import as_if, detect
from trainfit.hardware.catalogue import find
from trainfit.jobs import encoder, job_plan
from trainfit.jobs.encoder import PreparedEncoder
from trainfit.jobs.gpt import PreparedGpt
from trainfit.jobs.registry import job_module
from trainfit.packing import steps
from trainfit.planning import cpu_choice, fit, planner
from trainfit.planning.cpu_choice import StepRequest, StepTime, StepTimes
from trainfit.planning.estimator import depths
from trainfit.planning.estimator.estimate import Answer, Room
from trainfit.planning.estimator.step_time import Done, Work

GPUS = ("t4", "v100", "3090", "4090", "a100", "h200")
TASKS = list(COMMANDS)
ASKS_FOR_A_GPU = {
    *("a10", "a100", "a30", "a40", "gpu_3090", "gpu_4090", "gpu_low_mem", "h100", "h200"),
    *("rtx_4080", "rtx_5090", "t4", "v100"),
}
NO_GPU = (
    "trainfit: hardware={}, but there is no GPU here; use hardware=auto or cpu; "
    "`trainfit plan {} --gpu NAME` plans for any GPU"
)
NO_HALF = (
    "trainfit: device.mixed_precision is {}, which this CPU does not multiply; "
    "set it to auto or off"
)
TOO_LARGE = "exit 2: ['trainfit: the job does not fit this machine; "
ASSUMED = job_plan.assumed_lengths
BUILD = cache(encoder.try_building)


def synthetic(task: str, longest: int) -> Any:
    """Some of the lengths that a plan assumes."""
    return ASSUMED(task, longest)[::20]


def short(_task: str, longest: int) -> Any:
    return np.minimum(np.random.default_rng(0).integers(5, 21, 400), longest)


DATA = {"synthetic": synthetic, "short": short}


def answer(_factory: str, shapes: Any, targets: Any) -> list[Answer]:
    """The same small step, whatever is asked."""
    work = Work(
        kind="product",
        flops=10**9,
        skipped=0,
        nbytes=10**6,
        half=True,
        aligned=True,
        backward=False,
        update=False,
    )
    room = Room(
        workspace=0, activations=1 << 20, peak_allocated=1 << 24, peak_reserved=1 << 24, fits=True
    )
    step = Answer(
        weights=1 << 22,
        gradients=1 << 22,
        optimizer=1 << 23,
        rooms=(room,) * len(targets),
        done=(Done(work=work, times=1),),
    )
    return [step] * len(shapes)


def times(_place: Path, asked: str) -> StepTimes:
    """A CPU that is as fast in every precision."""
    threads = StepRequest.from_json(asked).threads
    halves: tuple[Precision, ...] = ("fp32", "bf16")
    return StepTimes(
        times=tuple(StepTime(precision=p, threads=t, seconds=0.1) for p in halves for t in threads)
    )


@pytest.fixture(scope="module")
def machines() -> dict[str, HardwareProfile]:
    return {"cpu": detect()} | {gpu: as_if(find(gpu)) for gpu in GPUS}


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(caches, "write", lambda *_: None)
    monkeypatch.setattr(composition, "parse_word", cache(composition.parse_word))
    monkeypatch.setattr(encoder, "try_building", BUILD)
    monkeypatch.setattr(depths, "_ask", answer)
    monkeypatch.setattr(cpu_choice, "_timed", times)
    monkeypatch.setattr(planner, "start", lambda _children: None)
    monkeypatch.setattr(steps, "_SAMPLE_SEQUENCES", 512)
    monkeypatch.setattr(steps, "_SAMPLE_LEAST_STEPS", 8)
    monkeypatch.setattr(fit, "_LOOKED_AT", 4)


@contextmanager
def on(task: str, profile: HardwareProfile, data: str) -> Iterator[None]:
    """A machine, and data whose lengths are all that a plan looks at."""

    def prepare(composed: Composed) -> Any:
        if task == "gpt":
            ids = np.zeros(1 << 18, dtype=np.int8)
            tokens: Any = SimpleNamespace(train=ids, validation=ids)
            return PreparedGpt(composed=composed, data=tokens)
        lengths = DATA[data](task, composed.config.data.max_length)
        starts = np.cumsum(lengths) - lengths
        ids = np.zeros(lengths.sum(), dtype=np.int32)
        part = Tokens(ids=ids, starts=starts, lengths=lengths, labels=np.zeros_like(lengths))
        dataset = Dataset(train=part, validation=part, test=part, metadata={})
        nothing: Any = None
        return PreparedEncoder(
            composed=composed,
            chosen=nothing,
            datasets=(dataset,),
            ids=((),),
            baselines=nothing,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_plan, "detect", lambda: profile)
        patch.setattr(job_plan, "assumed_lengths", DATA[data])
        patch.setattr(job_module(task), "prepare", prepare)
        yield


def refusal(composed: Composed, profile: HardwareProfile) -> str | None:
    """The line that a command is refused with, where that is right."""
    device = composed.config.device
    if profile.gpus:
        return None
    if composed.hardware in ASKS_FOR_A_GPU and device.use_cuda is not False:
        return NO_GPU.format(composed.hardware, composed.task)
    half, own = device.mixed_precision, composed.origins["device.mixed_precision"] == "override"
    able = {"fp16": False, "bf16": profile.cpu.native_bf16}.get(half, True)
    return NO_HALF.format(half) if own and not able else None


def pinned(composed: Composed) -> dict[str, Any]:
    """The settings of a plan that are set already."""
    values = composed.values()
    found = {
        "batch_size": values["training.batch_size"],
        "gradient_accumulation_steps": values["optimization.gradient_accumulation_steps"],
        "eval_batch_size": values["training.eval_batch_size"],
        "effective_batch_size": values["training.effective_batch_size"],
    }
    both = (found["batch_size"], found["gradient_accumulation_steps"])
    if "auto" not in both and found["effective_batch_size"] == "auto":
        found["effective_batch_size"] = both[0] * both[1]
    effective = found["effective_batch_size"]
    if "auto" not in (*both, effective) and both[0] * both[1] < effective:
        del found["gradient_accumulation_steps"]  # a preset's, for a smaller batch
    return {name: value for name, value in found.items() if value != "auto"}


def fault(
    command: list[str], composed: Composed, profile: HardwareProfile, capsys: Any
) -> str | None:
    """What is wrong with a command, if anything is."""
    code = run(command)
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if "trainfit: note: " not in line]
    expected = refusal(composed, profile)
    if code or expected is not None:
        right = (code, lines) == (2, [expected])
        return None if right else f"exit {code}: {lines}, not {expected}"
    made = json.loads(told.out)
    made = made.get("plan", made)
    wrong = {n: made[n] for n, value in pinned(composed).items() if made[n] != value}
    return f"made {wrong}" if wrong else None


def words_of(task: str) -> list[tuple[str, ...]]:
    """Presets, experiments, both, and what the documents write in one command."""
    experiments = [(f"experiment={name}",) for name in options(task, "experiment")]
    presets = [(f"hardware={name}",) for name in options(task, "hardware")]
    return [*presets, *experiments, *COMMANDS[task]]


SHARE = 9
"""One case in so many is part of `make test`: every machine and data, in turn with the words."""
SHARES = [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, SHARE))]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("task", TASKS)
def test_presets_experiments_and_commands_of_the_documents(
    task: str, share: int, machines: dict[str, HardwareProfile], capsys: Any
) -> None:
    cases = list(product(words_of(task), DATA, machines))[share::SHARE]
    assert not [f for w, d, m in cases for f in faults(task, w, d, m, machines, capsys)]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("task", TASKS)
def test_every_override_of_the_documents(
    task: str, share: int, machines: dict[str, HardwareProfile], capsys: Any
) -> None:
    shown = [(row[1],) for rows in SHOWN.values() for row in rows if row[0] == task]
    cases = list(product(shown, DATA, machines))[share::SHARE]
    assert not [f for w, d, m in cases for f in faults(task, w, d, m, machines, capsys)]


def faults(
    task: str,
    words: tuple[str, ...],
    data: str,
    name: str,
    machines: dict[str, HardwareProfile],
    capsys: Any,
) -> Iterator[str]:
    """Plan and dry-run the words on a machine."""
    composed = compose(task, words)
    gpu = [] if name == "cpu" else ["--gpu", name]
    commands = (["plan", task, *gpu, "--json"], ["train", task, "--dry-run", "--json"])
    with on(task, machines[name], data):
        for command in commands:
            what = fault([*command, *words], composed, machines[name], capsys)
            if what is not None:
                yield f"{' '.join([*command, *words])} on {name}: {what}"


PARTS = 8
"""Parts of the documents' words, each of which takes a minute or two at real shapes."""


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["cpu", *GPUS])
@pytest.mark.parametrize("task", TASKS)
def test_the_documents_by_the_estimator(
    task: str, name: str, part: int, machines: dict[str, HardwareProfile], capsys: Any
) -> None:
    """The same at real shapes, where some do not fit: that is told, and is no refusal."""
    found = [
        each
        for words in words_of(task)[part::PARTS]
        for data in DATA
        for each in faults(task, words, data, name, machines, capsys)
        if TOO_LARGE not in each
    ]
    assert not found


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_yaml_block_of_the_hardware_guide_as_a_file(
    block: str, machines: dict[str, HardwareProfile], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(block)
    for name, profile in machines.items():
        gpu = [] if name == "cpu" else ["--gpu", name]
        composed = compose("nli", with_file("nli", file, ()))
        with on("nli", profile, "synthetic"):
            command = ["plan", "nli", *gpu, "--json", "--config", str(file)]
            assert fault(command, composed, profile, capsys) is None
