"""Frozen records that the stages hand on, lossless in JSON; a plan's are in plan_records.py.

    detect ─► plan ─► tune ─► apply ─► train ─► verify ─► report

A stage takes the records before it and returns its own; none reaches back. `None` always means
"not known" or "not set", never zero. Sizes are in GiB, times in seconds, rates in TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import read_text, write_whole

if TYPE_CHECKING:
    import torch


_MOST = 8
_LEFT = ' style="text-align:left"'


def html_table(data: Any) -> str:
    """A mapping as two columns, a list of mappings as rows; everything in it is escaped."""
    if isinstance(data, Mapping):
        rows = "".join(
            f"<tr><th{_LEFT}>{_name(key)}</th><td{_LEFT}>{html_table(value)}</td></tr>"
            for key, value in data.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(data, Sequence) and not isinstance(data, str):
        alike = data and all(isinstance(item, Mapping) for item in data)
        return _rows(data) if alike else _list(data)
    return escape(_scalar(data))


def _rows(items: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for item in items for key in item))
    heads = "".join(f"<th{_LEFT}>{_name(key)}</th>" for key in keys)
    rows = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{html_table(item.get(key))}</td>' for key in keys)}</tr>"
        for item in items
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _list(items: Sequence[Any]) -> str:
    """The first few, since the lengths of a data set may be thousands."""
    shown = ", ".join(html_table(item) for item in items[:_MOST])
    return shown if len(items) <= _MOST else f"{shown}, … ({len(items):,} in all)"


def _name(key: str) -> str:
    return escape(key.replace("_", " "))


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of the records: JSON both ways, to text or to a file, and a table in a notebook."""

    def to_json(self, indent: int | None = 2) -> str:
        """The record as strict JSON text."""
        return codec.dumps(self, indent)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """The record that `text` holds; `source` is named in an error."""
        return codec.loads(cls, text, source)

    def save(self, path: Path, *, parents: bool = True) -> None:
        """Write the record whole or not at all; `parents` makes its folder where there is none."""
        write_whole(path, self.to_json() + "\n", parents=parents)

    def _repr_html_(self) -> str:
        """The record as a table, where a notebook shows it."""
        return html_table(codec.encode(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record that `save` wrote."""
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"cannot read {path} ({reason(error)})", "give a file trainfit wrote"
            ) from None
        return cls.from_json(text, str(path)).from_a_file()

    def from_a_file(self) -> Self:
        """Mark every task in the record: its words are a file's, not the user's."""
        parts = {each.name: _from_a_file(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **parts)


def _from_a_file(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_from_a_file, value))
    return value.from_a_file() if isinstance(value, Record) else value


# ── detect ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Record):
    """Something about the machine that a person should know, and what to do about it."""

    code: str
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink(Record):
    """The link of a GPU to the host: a narrow one makes every copy slow."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState(Record):
    """What the driver says of a GPU right now; everything may be unknown."""

    memory_used_gib: float | None = None
    memory_used_by_others_gib: float | None = None
    power_limit_w: float | None = None
    power_max_w: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    utilisation_percent: int | None = None
    ecc: bool | None = None
    pcie: PcieLink = PcieLink()


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(Record):
    """One device that training could run on."""

    index: int
    name: str
    vendor: Literal["nvidia", "amd", "apple", "unknown"]
    slug: str | None
    """The catalogue's row, or None for a GPU that it does not know (then there is no peak)."""
    memory_gib: float
    """What a program can see of it, which is less than the box says."""
    compute_capability: str
    native_bf16: bool
    """Matrix units take bfloat16. An emulated bfloat16, as on a T4, does not count."""
    tf32: bool
    fp16: bool
    fp8: bool
    sm_count: int | None = None
    uuid: str | None = None
    mig: str | None = None
    """The profile of a MIG slice, such as 1g.10gb."""
    state: GpuState = GpuState()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu(Record):
    """The processor as this process may use it."""

    name: str
    cores: int
    """Cores that affinity and cgroup allow, which in a container are fewer than the host has."""
    host_cores: int
    native_bf16: bool = False
    assumed: bool = False
    """True beside a GPU that is not here: a typical processor, and not this machine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild(Record):
    """Which torch is installed, and for what."""

    version: str
    backend: Literal["cpu", "cuda", "rocm", "mps"]
    cuda: str | None = None
    cudnn: str | None = None
    hip: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSupport(Record):
    """What torch.compile needs on this machine."""

    c_compiler: str | None
    python_headers: bool
    triton: str | None

    def missing(self, gpu: bool) -> tuple[str, ...]:
        """What torch.compile would fail for, for a GPU (Triton) or the CPU (C++)."""
        lacks = []
        if self.c_compiler is None:
            lacks.append("a C compiler")
        if not self.python_headers:
            lacks.append("Python headers")
        if gpu and self.triton is None:
            lacks.append("Triton")
        return tuple(lacks)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile(Record):
    """The machine as it is now, from detect()."""

    gpus: tuple[Gpu, ...]
    """What torch can train on, in torch's order."""
    other_gpus: tuple[str, ...] = ()
    """GPUs that are in the machine but that this process cannot use, with the reason in notes."""
    cpu: Cpu
    memory_gib: float
    memory_available_gib: float
    shm_gib: float | None
    disk_free_gib: float
    torch: TorchBuild | None
    """None where torch was not asked, as for a GPU that is only looked up."""
    driver: str | None
    driver_cuda: str | None
    compile: CompileSupport
    platform: str
    python: str
    notes: tuple[Note, ...] = ()
    simulated: bool = False
    """True when the GPU comes from the catalogue and is not here."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What the jobs train on, as torch calls it."""
        return "cuda" if any(gpu.vendor != "apple" for gpu in self.gpus) else "cpu"


# ── tune, apply ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Record):
    """A measured quantity: the median, every raw sample, and the datasheet's figure if any."""

    name: str
    unit: str
    value: float
    samples: tuple[float, ...]
    datasheet: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements(Record):
    """What `check --measure` found on one device, with what it depends on."""

    device: str
    torch: str
    driver: str | None
    taken: str
    items: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Record):
    """One switch: what was asked, what it was before, and what it is now as read back."""

    name: str
    requested: Scalar
    before: Scalar
    after: Scalar
    note: str = ""
    """Why it could not be done, or what else to know."""

    @property
    def done(self) -> bool:
        """Whether the switch now stands where it was asked to."""
        return self.after == self.requested


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied(Record):
    """What apply() did to this process."""

    changes: tuple[Change, ...]

    def __getitem__(self, name: str) -> Change:
        """The change of that name."""
        return {change.name: change for change in self.changes}[name]


# ── train, verify ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(Record):
    """Something that happened in a run: an OOM, a resume, a skipped step."""

    kind: str
    step: int
    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(Record):
    """How a run ended."""

    run: str
    """The run folder."""
    status: Literal["finished", "stopped", "failed"]
    steps: int
    seconds: float
    metrics: dict[str, float]
    """Of the best evaluation where one metric decides, else of the last."""
    peak_memory_gib: float | None
    events: tuple[Event, ...] = ()
    best_step: int | None = None
    """The step of the best evaluation; its checkpoint is kept."""
    cuts: tuple[tuple[int, int], ...] = ()
    """(step, rung): from that step on, steps were cut by that rung of the ladder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptItem(Record):
    """One optimization: what was asked for against what was seen to run."""

    name: str
    requested: Scalar
    observed: Scalar
    status: Literal["active", "not_active", "off", "not_applicable"]
    evidence: str
    mend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt(Record):
    """The proof of what was active in a run."""

    run: str
    items: tuple[ReceiptItem, ...]


# ── bring your own ────────────────────────────────────────────────────────────────────────────


class TrainTask(Protocol):
    """What a user brings to have it planned, tuned, trained and verified.

    A step is a fixed set of sequences. How it is cut into micro-batches is the engine's decision,
    so a task answers for any subset: the loss is a sum, and the weights say of how much.

    A task may also have `indivisible = True`, where a step must be one micro-batch;
    `after_step(model, step)`, called after each update; and `state_dict()` with
    `load_state_dict(state)`, which checkpoints then keep.
    """

    def build_model(self) -> torch.nn.Module:
        """A new model with its weights, on the CPU or where it will train."""

    def lengths(self) -> Sequence[int]:
        """Tokens in each training sequence, by index, without reading its text."""

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """The sequences of each optimizer step of an epoch, by index; the same every time."""

    def weight(self, sequences: Sequence[int]) -> float:
        """How much these sequences count in the loss, known before they are computed."""

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, torch.Tensor]:
        """The micro-batch of these sequences, on the CPU, in a shape of `rows` × `width`.

        With `slots` it is packed: one row, the sequences end to end, and whatever is one per
        sequence filled up to that number. Without, it is padded. It may be empty of sequences.
        """

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The summed loss of a micro-batch; filler counts nothing."""

    def evaluate(self, model: torch.nn.Module, batch_size: int) -> dict[str, float]:
        """Metrics on the validation data, at most so many sequences at a time.

        The model is on its device and in evaluation mode, under the run's autocast and without
        gradients. Where memory runs out, it is asked again with half the batch.
        """
