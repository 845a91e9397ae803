"""Records as tables in a terminal, or as plain text in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import measure_renderables
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainfit.core.errors import printable

if TYPE_CHECKING:
    from trainfit.conf import Composed
    from trainfit.core.plan_records import Recommendation
    from trainfit.core.records import Gpu, HardwareProfile, Measurement, Measurements, Note
    from trainfit.hardware.catalogue import GpuSpec

PLAIN_WIDTH = 110
_WORTH_SAYING = 1.0
"""Seconds from which on the time of a stage is shown."""
_QUIET = 2.0
"""Seconds until the first sign of life in a pipe."""


class _Console(Console):
    """A console to which names from data are plain text: neither markup nor terminal commands."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console(stderr: bool = False) -> Console:
    """A console that does not fold lines at 80 columns when it is piped into a file."""
    made = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Print on standard error the activity, and after a second or more how long it took.

    A terminal shows a spinner and the time so far; a pipe gets a line now and then.
    """
    shown, begun = console(stderr=True), time.monotonic()
    if shown.is_terminal:
        name = TextColumn("{task.description}", markup=False)
        columns = SpinnerColumn(), name, TimeElapsedColumn()
        with Progress(*columns, console=shown, transient=True) as progress:
            progress.add_task(what, total=None)
            yield
    else:
        print(f"trainfit: {what}", file=sys.stderr, flush=True)
        with signs_of_life(what):
            yield
    spent = time.monotonic() - begun
    if spent >= _WORTH_SAYING:
        print(f"trainfit: {what}: {spent:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def signs_of_life(what: str) -> Iterator[None]:
    """Print the time so far after 2, 6, 14 and 30 seconds, and so on."""
    done, stream = threading.Event(), sys.stderr

    def tell() -> None:
        pause = so_far = _QUIET
        while not done.wait(pause):
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"trainfit: {what}: {so_far:.0f} s so far", file=stream, flush=True)
            pause *= 2
            so_far += pause

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def table(
    title: str = "", left: Iterable[str] = (), right: Iterable[str] = (), **options: Any
) -> Table:
    """A table without a frame; the columns of `right` are numbers and never wrap."""
    made = _Table(title=title or None, title_justify="left", box=None, pad_edge=False, **options)
    for heading in left:
        made.add_column(heading)
    for heading in right:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


class _Table(Table):
    """A table that a narrower terminal shows as a list, with a line for each number."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide, needed = options.update(width=10_000), 2 * (len(self.columns) - 1)
        for column in self.columns:
            size = measure_renderables(console, wide, [column.header, *column.cells])
            needed += size.maximum if column.no_wrap else size.minimum
        if needed <= options.max_width or not any(column.no_wrap for column in self.columns):
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "table.title")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            for at, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
                if str(cell):
                    yield Text(f"  {column.header} {cell}" if at else str(cell))


def machine_page(
    profile: HardwareProfile, specs: Iterable[GpuSpec | None], measured: Measurements | None
) -> RenderableType:
    """First part of `trainfit check`: the hardware, its measurements and notes."""
    parts: list[RenderableType] = [
        _gpu_panel(gpu, spec, profile.simulated)
        for gpu, spec in zip(profile.gpus, specs, strict=True)
    ]
    parts.append(_machine_panel(profile))
    if measured is not None:
        parts.append(measured_table(f"Measured {measured.taken}", measured.items))
    parts += [_note(note) for note in profile.notes]
    return Group(*parts)


def recommended_page(recommended: Recommendation) -> RenderableType:
    """Second part of `trainfit check`: recommended settings for an example model."""
    job, model = recommended.task, recommended.model
    length = f"{recommended.method}, up to {recommended.max_length} tokens"
    made = table("Recommended settings", ("setting", "value", "why"))
    for reason in recommended.reasons:
        made.add_row(reason.setting, Text(_value(reason.value), "bold"), reason.why)
    fits = "" if recommended.fits else " It does not fit here."
    lines = [
        Text(f"For {job} with {model} ({length}), as `trainfit plan {job}` has them.{fits}"),
        Text(f"For a model of yours: `trainfit plan {job} --model NAME`.", "dim"),
    ]
    advice = [Text.assemble(("Advice: ", "bold yellow"), line) for line in recommended.advice]
    return Group(made, *lines, *advice)


def gpu_line(gpu: Gpu) -> str:
    return (
        f"{gpu.index}: {gpu.name}, {gpu.memory_gib:.2f} GiB, compute capability "
        f"{gpu.compute_capability}, bf16 {_yes(gpu.native_bf16)}, TF32 {_yes(gpu.tf32)}"
    )


def gpu_list(specs: Iterable[GpuSpec]) -> Table:
    figures = ("GB", "GB/s", "bf16", "fp16", "TF32", "fp32")
    made = table("GPUs of the catalogue", ("slug", "also"), figures)
    for spec in specs:
        made.add_row(
            spec.slug,
            ", ".join(spec.short_names),
            *(f"{n:g}" for n in (spec.memory_gb, spec.bandwidth_gbs)),
            *(_rate(spec.peak_tflops(kind)) for kind in ("bf16", "fp16", "tf32", "fp32")),
        )
    return made


def config_table(composed: Composed) -> Table:
    """A configuration with the layer that each value came from."""
    made = table("", ("key", "value", "from"))
    for key, value in composed.values().items():
        origin = composed.origins[key]
        made.add_row(key, _value(value), Text(origin, "dim" if origin == "default" else "bold"))
    return made


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Predictions as rows, the numbers on the right."""
    names = list(rows[0]) if rows else []
    numbers = [name for name in names if isinstance(rows[0][name], (int, float))]
    words = [name for name in names if name not in numbers]
    made = table("", words, numbers)
    for row in rows:
        made.add_row(*(Text(_answer(row[name])) for name in (*words, *numbers)))
    return made


def _answer(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _gpu_panel(gpu: Gpu, spec: GpuSpec | None, simulated: bool) -> Panel:
    others = gpu.state.memory_used_by_others_gib
    title = f"{gpu.name} (from the catalogue, not in this machine)" if simulated else gpu.name
    rows: list[tuple[str, str]] = [
        (
            "Memory",
            f"{gpu.memory_gib:.2f} GiB" + (f", {others:.2f} used by others" if others else ""),
        ),
        ("Compute capability", gpu.compute_capability),
        ("FP16", _yes(gpu.fp16) + ("" if gpu.fp16 else " (no matrix units)")),
        ("BFloat16", _yes(gpu.native_bf16) + ("" if gpu.native_bf16 else " (not native)")),
        ("TF32", _yes(gpu.tf32)),
        ("FP8", _yes(gpu.fp8)),
        ("Catalogue", spec.slug if spec else "unknown: no peak, so no MFU"),
    ]
    if spec is not None:
        rows.append(("Dense peak", _peaks(spec)))
        rows.append(("Bandwidth", f"{spec.bandwidth_gbs:g} GB/s"))
        if spec.mfu_good and spec.mfu_excellent:
            good, excellent = (f"{a} to {b}%" for a, b in (spec.mfu_good, spec.mfu_excellent))
            rows.append(("MFU target", f"good {good}, excellent {excellent}"))
    rows += _state_rows(gpu)
    return Panel(named_rows(rows), title=f"GPU {gpu.index}: {title}", title_align="left")


def _state_rows(gpu: Gpu) -> list[tuple[str, str]]:
    state, pcie = gpu.state, gpu.state.pcie
    rows = []
    if state.power_limit_w is not None:
        rows.append(("Power cap", f"{state.power_limit_w:.0f} W{_of(state.power_max_w, ' W')}"))
    if state.clock_sm_mhz is not None:
        now = f"{state.clock_sm_mhz} MHz{_of(state.clock_sm_max_mhz, ' MHz')}"
        reasons = ", ".join(state.throttle_reasons) or "not throttled"
        rows.append(("Clock", f"{now}, {reasons}"))
    if pcie.width is not None and pcie.generation is not None:
        link = f"generation {pcie.generation}{_of(pcie.max_generation)}"
        rows.append(("PCIe", f"{link}, {pcie.width} lanes{_of(pcie.max_width)}"))
    if state.ecc is not None:
        rows.append(("ECC", "on" if state.ecc else "off"))
    if gpu.mig is not None:
        rows.append(("MIG slice", gpu.mig))
    return rows


def _of(most: float | None, unit: str = "") -> str:
    return "" if most is None else f" of {most:.0f}{unit}"


def _peaks(spec: GpuSpec) -> str:
    kinds = ("bf16", "fp16", "tf32", "fp32", "fp8")
    rates = [(kind, spec.peak_tflops(kind)) for kind in kinds]
    return ", ".join(f"{kind} {rate:g}" for kind, rate in rates if rate) + " TFLOP/s"


def _machine_panel(profile: HardwareProfile) -> Panel:
    cpu = profile.cpu
    beside = "the one beside the GPU" if cpu.assumed else cpu.name
    cores = f"{cpu.cores} usable" + (f" of {cpu.host_cores}" if cpu.host_cores > cpu.cores else "")
    bf16 = "" if profile.simulated else f", bf16 {_yes(cpu.native_bf16)}"  # not tried then
    rows = [
        ("CPU", f"{beside}, {cores} cores{' (assumed)' if cpu.assumed else bf16}"),
        ("Memory", f"{profile.memory_gib:.1f} GiB, {profile.memory_available_gib:.1f} available"),
        ("/dev/shm", "none" if profile.shm_gib is None else f"{profile.shm_gib:.1f} GiB"),
        ("Disk here", f"{profile.disk_free_gib:.1f} GiB free"),
        ("Torch", _torch(profile)),
        ("Driver", _driver(profile)),
        ("torch.compile", _compile(profile)),
        ("Python", f"{profile.python} on {profile.platform}"),
    ]
    return Panel(named_rows(rows), title="Machine", title_align="left")


def _torch(profile: HardwareProfile) -> str:
    build = profile.torch
    if build is None:
        return "not asked"
    versions = [("CUDA", build.cuda), ("cuDNN", build.cudnn), ("HIP", build.hip)]
    extras = "".join(f", {name} {version}" for name, version in versions if version)
    return f"{build.version} ({build.backend}{extras})"


def _driver(profile: HardwareProfile) -> str:
    if profile.driver is None:
        return "not asked" if profile.simulated else "none found"
    cuda = f" (CUDA up to {profile.driver_cuda})" if profile.driver_cuda else ""
    return f"{profile.driver}{cuda}"


def _compile(profile: HardwareProfile) -> str:
    support = profile.compile
    missing = support.missing(gpu=bool(profile.gpus) and not profile.simulated)
    if missing:
        return f"would fail: {' and '.join(missing)} missing"
    triton = f", Triton {support.triton}" if support.triton else ""
    return f"ready ({support.c_compiler}{triton})"


def measured_table(title: str, items: Iterable[Measurement]) -> Table:
    """Measurements, with the datasheet's figures where there are any."""
    made = table(title, ("what",), ("median", "datasheet", "share", "samples"))
    for item in items:
        made.add_row(
            Text(item.name),
            Text(f"{item.value:.4g} {item.unit}"),
            "" if item.datasheet is None else f"{item.datasheet:g} {item.unit}",
            "" if item.datasheet is None else f"{item.value / item.datasheet:.0%}",
            str(len(item.samples)),
        )
    return made


def _note(note: Note) -> Text:
    text = Text.assemble(("Note: ", "bold yellow"), note.text)
    return text.append(f" {note.fix}") if note.fix else text


def named_rows(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and texts side by side."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def _value(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:g}"
