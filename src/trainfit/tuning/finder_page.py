"""What the batch-size finder found, as a page for the terminal."""

from __future__ import annotations

from trainfit.tuning.finder_records import BatchSizeFound


def page(found: BatchSizeFound) -> str:
    """The budgets, the cut of a step, the probes, and how it was found."""
    share = f"{found.margin:.0%} of it"
    lines = ["Micro-batch", _budget("largest that fits", found.largest_rows, found.largest_tokens)]
    lines.append(_budget(f"recommended, {share}", found.recommended_rows, found.recommended_tokens))
    if found.knee_rows is not None:
        knee = _budget("within 2% of its speed from", found.knee_rows, found.knee_tokens)
        lines.append(knee)
    lines += ["", "Step", f"  {_step(found)}", "", "Memory", *_memory(found)]
    if found.probes:
        lines += ["", "Probes", *_probes(found)]
    lines += ["", *(f"- {reason}" for reason in found.reasons), f"- {_time(found)}"]
    return "\n".join(lines)


def _budget(name: str, rows: int, tokens: int | None) -> str:
    length = "" if tokens is None else f"{tokens:>12,} tokens"
    return f"  {name:<28}{rows:>8,} rows{length}"


def _step(found: BatchSizeFound) -> str:
    many = len(found.cuts)
    if many == 1:
        return f"{found.effective_batch_size} sequences in one micro-batch"
    if many <= 8:
        parts = " + ".join(map(str, found.cuts))
        return f"{found.effective_batch_size} sequences = {parts}: accumulate {many} micro-batches"
    least, most = min(found.cuts), max(found.cuts)
    sizes = f"{most}" if least == most else f"{least} to {most}"
    return f"{found.effective_batch_size} sequences in {many} micro-batches of {sizes}"


def _memory(found: BatchSizeFound) -> list[str]:
    law, others = found.law, found.used_by_others_gib
    used = "" if not others else f", besides {others:.2f} GiB that others use"
    return [
        f"  there is room for {found.capacity_gib:.2f} GiB{used}",
        f"  a step takes {law.fixed_gib:.2f} GiB + {law.gib_per_row:.4g} GiB a row",
    ]


def _probes(found: BatchSizeFound) -> list[str]:
    lines = ["      rows   allocated    reserved   predicted     seconds"]
    for probe in found.probes:
        predicted = "unknown" if probe.predicted_gib is None else f"{probe.predicted_gib:.2f} GiB"
        peaks = f"{probe.peak_allocated_gib:>8.2f} GiB{probe.peak_reserved_gib:>8.2f} GiB"
        lines.append(f"  {probe.rows:>8}{peaks}{predicted:>12}{probe.seconds:>12.4f}")
    return lines


def _time(found: BatchSizeFound) -> str:
    whole = f"took {found.seconds:.1f} s"
    after = found.seconds_after_build
    return whole if after is None else f"{whole}, {after:.1f} s of them after the model was built"
