"""Frozen records that the stages hand on, lossless in JSON; a plan's are in plan_records.py.

    detect ─► plan ─► tune ─► apply ─► train ─► verify ─► report

A stage takes the records before it and returns its own; none reaches back. `None` always means
"not known" or "not set", never zero. Sizes are in GiB, times in seconds, rates in TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from trainfit.core import codec
from trainfit.core.errors import BadInput, reason
from trainfit.core.files import html_table, read_text, text_table, write_whole

if TYPE_CHECKING:
    import torch


Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of the records: JSON both ways, to text or to a file, and a table in a notebook."""

    def to_json(self, indent: int | None = 2) -> str:
        """Return the record as strict JSON text."""
        return codec.dumps(self, indent)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """Read a record from JSON text; an error names the `source`."""
        return codec.loads(cls, text, source)

    def save(self, path: Path, *, parents: bool = True) -> None:
        """Write the record whole or not at all; `parents` makes a missing folder."""
        write_whole(path, self.to_json() + "\n", parents=parents)

    def _repr_html_(self) -> str:
        """Return the record as a table for notebooks."""
        return html_table(codec.encode(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record that `save` wrote."""
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            fix = "give a file trainfit wrote"
            raise BadInput(f"cannot read {path} ({reason(error)})", fix) from None
        return cls.from_json(text, str(path)).from_a_file()

    def from_a_file(self) -> Self:
        """Mark every task in the record as read from a file, so that it is not trusted."""
        parts = {each.name: _from_a_file(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **parts)


def _from_a_file(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_from_a_file, value))
    return value.from_a_file() if isinstance(value, Record) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Record):
    """A problem or limit of the machine, and its fix."""

    code: str
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink(Record):
    """PCIe link of a GPU to the host: a narrow one slows every copy."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState(Record):
    """Current state of a GPU by its driver; every field may be unknown."""

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
    """Row of the catalogue; None for an unknown GPU, which has no peak."""
    memory_gib: float
    """Memory visible to a program, which is less than advertised."""
    compute_capability: str
    native_bf16: bool
    """True if matrix units take bfloat16; emulated bfloat16, as on a T4, does not count."""
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
    """Processor, as far as this process may use it."""

    name: str
    cores: int
    """Cores that affinity and cgroup allow; in a container, fewer than the host has."""
    host_cores: int
    native_bf16: bool = False
    assumed: bool = False
    """True for a typical processor, assumed beside a GPU that is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild(Record):
    """Version and backend of the installed torch."""

    version: str
    backend: Literal["cpu", "cuda", "rocm", "mps"]
    cuda: str | None = None
    cudnn: str | None = None
    hip: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSupport(Record):
    """Tools for torch.compile on this machine."""

    c_compiler: str | None
    python_headers: bool
    triton: str | None

    def missing(self, gpu: bool) -> tuple[str, ...]:
        """List the missing tools without which torch.compile fails, for a GPU or the CPU."""
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
    """Current state of the machine, from detect()."""

    gpus: tuple[Gpu, ...]
    """GPUs that torch can train on, in torch's order."""
    other_gpus: tuple[str, ...] = ()
    """GPUs of the machine that this process cannot use; the notes say why."""
    cpu: Cpu
    memory_gib: float
    memory_available_gib: float
    shm_gib: float | None
    disk_free_gib: float
    torch: TorchBuild | None
    """None where torch was not imported, as for a GPU of the catalogue."""
    driver: str | None
    driver_cuda: str | None
    compile: CompileSupport
    platform: str
    python: str
    notes: tuple[Note, ...] = ()
    simulated: bool = False
    """True when the GPU comes from the catalogue and is not here."""

    @property
    def gpu(self) -> Gpu | None:
        """First GPU, which the jobs train on, or None."""
        return self.gpus[0] if self.gpus else None

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Device that the jobs train on, by torch's name."""
        return "cuda" if any(gpu.vendor != "apple" for gpu in self.gpus) else "cpu"


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
    """Results of `check --measure` on one device, with the versions they depend on."""

    device: str
    torch: str
    driver: str | None
    taken: str
    items: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Record):
    """A switch: requested value, value before, and value read back after."""

    name: str
    requested: Scalar
    before: Scalar
    after: Scalar
    note: str = ""
    """Reason why it could not be set, or a remark."""

    @property
    def done(self) -> bool:
        """True if the switch has the requested value."""
        return self.after == self.requested


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied(Record):
    """Changes that apply() made to this process."""

    changes: tuple[Change, ...]

    def __getitem__(self, name: str) -> Change:
        """Return the change of that name."""
        return {change.name: change for change in self.changes}[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(Record):
    """An event of a run: out of memory, a resume, a skipped step."""

    kind: str
    step: int
    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(Record):
    """Outcome of a run."""

    run: str
    """The run folder."""
    status: Literal["finished", "stopped", "failed"]
    steps: int
    seconds: float
    metrics: dict[str, float]
    """Metrics of the best evaluation where one metric decides, else of the last."""
    peak_memory_gib: float | None
    events: tuple[Event, ...] = ()
    best_step: int | None = None
    """Step of the best evaluation, whose checkpoint is kept."""
    cuts: tuple[tuple[int, int], ...] = ()
    """(step, rung) pairs: the rung of the ladder of cuts used from that step on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptItem(Record):
    """One optimization: requested against observed."""

    name: str
    requested: Scalar
    observed: Scalar
    status: Literal["active", "not_active", "off", "not_applicable"]
    evidence: str
    mend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt(Record):
    """Evidence of which optimizations were active in a run."""

    run: str
    items: tuple[ReceiptItem, ...]

    def verdict(self) -> str:
        """Sentence that names the settings that were asked for and not active."""
        failed = [item.name for item in self.items if item.status == "not_active"]
        if not failed:
            return "Everything that was asked for was active."
        return f"Asked for and not active: {', '.join(failed)}."

    def __repr__(self) -> str:
        """Table for a terminal."""
        rows = [(item.name, item.status.replace("_", " "), item.evidence) for item in self.items]
        return f"Receipt of {self.run}\n{text_table(rows)}\n{self.verdict()}"


class TrainTask(Protocol):
    """Interface of a user's own training task, to be planned, tuned, trained and verified.

    A step is a fixed set of sequences. The engine decides how to cut it into micro-batches, so the
    loss of any subset is a sum, and `weight` says how much the subset counts.

    A task may also have `indivisible = True`, where a step must be one micro-batch; `capturable =
    True`, where `loss` computes the same from the same batch and never waits for the device;
    `after_step(model, step)`, called after each update; `collate_there(device)`, which gives a
    function like `collate` that makes batches on the device, or None; and `state_dict()` with
    `load_state_dict(state)`, which checkpoints then keep.
    """

    def build_model(self) -> torch.nn.Module:
        """Build a new model with its weights, on the CPU or on its training device."""

    def lengths(self) -> Sequence[int]:
        """Return the tokens of each training sequence, by index, without reading its text."""

    def steps(self, epoch: int) -> Sequence[Sequence[int]]:
        """Return the sequences of each optimizer step of an epoch, by index; always the same."""

    def weight(self, sequences: Sequence[int]) -> float:
        """Return how much these sequences count in the loss, before it is computed."""

    def collate(
        self, sequences: Sequence[int], rows: int, width: int, slots: int | None
    ) -> Mapping[str, torch.Tensor]:
        """Collate these sequences on the CPU into a micro-batch of shape `rows` × `width`.

        With `slots` it is packed: one row, the sequences end to end, and tensors with one item per
        sequence filled up to that number. Without, it is padded. There may be no sequences.
        """

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of a micro-batch, without filler."""

    def evaluate(self, model: torch.nn.Module, batch_size: int) -> dict[str, float]:
        """Compute metrics on the validation data, `batch_size` sequences at a time at most.

        The model is on its device and in evaluation mode, under the run's autocast and without
        gradients. When memory runs out, this is called again with half the batch.
        """
