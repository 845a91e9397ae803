"""What was run, on what data, on which machine, and with which configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainfit.records import HardwareProfile
from trainfit.redaction import redact_words
from trainfit.reports.figures import Block, Facts, Remark, Section, Table
from trainfit.reports.numbers import cell
from trainfit.reports.run_data import Run


def setting(run: Run) -> Section:
    """The section."""
    blocks: list[Block] = [Remark(text=text, tone="warning") for text in run.problems]
    blocks.append(Facts(title="Job", items=tuple(_job(run))))
    blocks.append(Facts(title="Machine", items=tuple(_machine(run))))
    if data := tuple(_data(run)):
        blocks.append(Facts(title="Data", items=data))
    if opening := run.parts[0].opening:
        rows = tuple((line,) for line in opening)
        blocks.append(Table(title="Really set, as torch says", columns=("",), rows=rows))
    if run.config.get("config"):
        blocks.append(_configuration(run))
    return Section(id="setting", title="What was run", blocks=tuple(blocks))


def device_of(run: Run) -> str:
    """The device in a few words."""
    for line in run.parts[0].opening:
        if line.startswith("Device: "):
            kind, _, rest = line.removeprefix("Device: ").partition(" (")
            return rest.partition(")")[0] if kind == "cuda" else f"{kind} ({rest}"
    if run.hardware and run.hardware.gpus:
        return run.hardware.gpus[0].name
    return (run.plan.gpu if run.plan else None) or "unknown device"


def model_of(run: Run) -> str:
    """The model's name; of a path its last part."""
    name = run.setting("model.name")
    if name is None:
        return str(run.setting("model.size") or "")
    return Path(str(name)).name if "/" in str(name) and Path(str(name)).is_dir() else str(name)


def _job(run: Run) -> Iterator[tuple[str, str]]:
    yield "task", str(run.config.get("task", "unknown"))
    if model := model_of(run):
        weights = run.setting("model.weights")
        yield "model", model + (f", {weights} weights" if weights not in (None, "auto") else "")
    if method := run.setting("model.method"):
        frozen = run.setting("model.freeze_encoder") is True
        if run.plan is not None:
            frozen = run.plan.workload.method == "frozen"
        yield "method", "frozen encoder" if frozen else str(method)
    for name in ("hardware", "experiment"):
        if run.config.get(name):
            yield f"{name} preset", str(run.config[name])
    if run.plan is not None and run.plan.ranks > 1:
        yield "ranks", str(run.plan.ranks)
    if command := run.environment.get("command"):
        first, *rest = redact_words(map(str, command))  # older runs hold it as typed
        yield "command", " ".join([Path(first).name, *rest])
    yield "folder", str(run.folder)


def _machine(run: Run) -> Iterator[tuple[str, str]]:
    yield "device", device_of(run)
    if run.hardware is not None:
        yield from _hardware(run.hardware)
    if "platform" in run.environment:
        yield "platform", str(run.environment["platform"])
    packages = run.environment.get("packages", {})
    versions = {"python": run.environment.get("python", ""), **packages}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _hardware(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    for gpu in profile.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_gib:.1f} GiB"
    cpu = profile.cpu
    yield "CPU", f"{cpu.name}, {cpu.cores} of {cpu.host_cores} cores"
    yield "memory", f"{profile.memory_gib:.1f} GiB"
    if profile.driver:
        yield "driver", profile.driver


def _data(run: Run) -> Iterator[tuple[str, str]]:
    folds = run.data.get("folds") or []
    if not folds:
        yield from _token_files(run.data.get("header"))
        return
    first: Mapping[str, Any] = folds[0]
    if len(folds) > 1:
        yield "folds", f"{len(folds)}; the counts are the first one's"
    for part in ("train", "validation", "test"):
        counts = first.get(part)
        if isinstance(counts, Mapping):
            yield part, _counts(counts)
    if classes := first.get("classes"):
        yield "classes", ", ".join(map(str, classes))


def _token_files(header: Any) -> Iterator[tuple[str, str]]:
    """Of a pretraining job."""
    if not isinstance(header, Mapping):
        return
    for part in ("train", "validation"):
        if isinstance(header.get(part), Mapping):
            yield part, _counts(header[part])
    if "vocab_size" in header:
        yield "vocabulary", cell(header["vocab_size"])


def _counts(counts: Mapping[str, Any]) -> str:
    said = []
    for key, value in counts.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            said.append(f"{cell(value)} {key.replace('_', ' ')}")
    return ", ".join(said)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted names."""
    if not isinstance(config, Mapping):
        return {prefix: config}
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _configuration(run: Run) -> Table:
    origins = run.config.get("origins") or {}
    rows = [
        (key, cell(value) if not isinstance(value, list) else str(value), origins.get(key, ""))
        for key, value in flat(run.config["config"]).items()
    ]
    rows.sort(key=lambda row: row[2] == "default")
    return Table(
        title="Configuration",
        columns=("key", "value", "from"),
        rows=tuple(rows),
        strong=tuple(at for at, row in enumerate(rows) if row[2] != "default"),
        folded=True,
    )
