"""The figures of docs/tuning.md that come from tune's record on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORK = json.loads((ROOT / "benchmarks/results/2026-11-15-tune-h200.json").read_text())["workloads"]
PAGE = " ".join((ROOT / "docs" / "tuning.md").read_text().split())
STEPS = {step["name"]: step for step in WORK["gpt"]["ladder"]["steps"]}


def point(work: str, mode: str, parts: int, way: str) -> dict[str, Any]:
    wanted = {"compile": mode, "micro_batches": parts, "way": way}
    return next(one for one in WORK[work]["grid"] if one["point"] == wanted)


def rate(work: str, mode: str, parts: int, way: str) -> float:
    return float(point(work, mode, parts, way)["samples_per_second"]["value"])


def gain(name: str) -> str:
    return f"{STEPS[name]['gain']['value']:.2f}×"


def gib(name: str) -> str:
    return f"{STEPS[name]['peak_memory_gib']:.2f}"


def test_rungs_of_the_ladder() -> None:
    for sentence in (
        f"bf16 gave {gain('mixed precision')}, from {gib('TF32')} to {gib('mixed precision')} GiB",
        f"first rung of the GPT's ladder: {gain('TF32')}",
        f"step {gain('attention kernel')} as fast and took {gib('attention kernel')} GiB"
        f" where it had been {gib('cuDNN benchmark')}",
        f"gained {gain('batch size')} from 8 to 64 sequences at a time, from"
        f" {gib('attention kernel')} to {gib('batch size')} GiB",
        f"{gib('gradient checkpointing')} GiB for {gib('torch.compile')} recomputing",
    ):
        assert sentence in PAGE
    slower = 1 - STEPS["gradient checkpointing"]["gain"]["value"]
    assert f"{slower:.0%} fewer samples per second" in PAGE
    assert f"{STEPS['fused AdamW']['gain']['value'] - 1:.0%} of the whole step" in PAGE
    for name in ("set_to_none", "loader workers", "pinned memory", "persistent workers"):
        assert abs(STEPS[name]["gain"]["value"] - 1) < 0.005
    cudnn = STEPS["cuDNN benchmark"]["gain"]
    assert f"{cudnn['value']:.2f}× ({cudnn['low']:.2f}–{cudnn['high']:.2f})" in PAGE
    assert "first step took 0.431 s with these, before 0.636 s" in PAGE
    assert "takes 0.431 s, before 0.636 s" in STEPS["persistent workers"]["note"]
    rates = [
        STEPS[n]["samples_per_second"]["value"] for n in ("fp16 instead of bf16", "torch.compile")
    ]
    assert "{:.0f} samples/s against {:.0f}".format(*rates) in PAGE


def test_points_of_the_grids() -> None:
    gpt = [rate("gpt", "default", parts, "plain") for parts in (1, 2)]
    gemma = [rate("nli-gemma", "default", parts, "packed") for parts in (1, 4)]
    deberta = [rate("nli-deberta", "default", parts, "packed") for parts in (1, 4)]
    graphs = [rate("gpt", "reduce-overhead", 1, "plain")]
    graphs.append(rate("nli-deberta", "reduce-overhead", 1, "packed"))
    some = rate("gpt", "default", 1, "selective") / gpt[0]
    kept = point("gpt", "default", 1, "selective")["peak_memory_gib"]
    for sentence in (
        f"GPT-2 124M {graphs[0]:.1f} samples/s against {gpt[0]:.1f}",
        f"DeBERTa-v3-base {graphs[1]:,.0f} against {deberta[0]:,.0f}",
        f"{gpt[0]:.0f} samples/s in one and {gpt[1]:.0f} in two",
        f"{gemma[0]:.0f} in one and {gemma[1]:.0f} in four",
        f"{deberta[0]:,.0f} in one and {deberta[1]:.0f} in four",
        f"{1 - some:.0%} and {kept:.2f} GiB with `selective`",
    ):
        assert sentence in PAGE, sentence


def measured_again(work: str, part: str) -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in WORK[work][part]["steps"] + WORK[work][part]["without"]}


def test_what_was_measured_apart_from_the_climb() -> None:
    """Packing against padding, and Liger's kernels against the compiler's."""
    deberta, gemma = (
        [found[name]["samples_per_second"]["value"] for name in ("the best", "packing")]
        for found in (measured_again(work, "removals") for work in ("nli-deberta", "nli-gemma"))
    )
    rows = measured_again("nli-gemma", "rows")
    pair = [rows[name] for name in ("Liger kernels", "torch.compile")]
    liger = [step["samples_per_second"]["value"] for step in pair]
    for sentence in (
        "DeBERTa-v3-base {:,.0f} samples/s against {:.0f}".format(*deberta),
        "Gemma-3-1B {:.0f} against {:.0f}".format(*gemma),
        "made {:.0f} samples/s with them and {:.0f} without".format(*liger),
        "took {:.1f} GiB for {:.1f}".format(*(step["peak_memory_gib"] for step in pair)),
    ):
        assert sentence in PAGE, sentence


def test_what_the_ladders_teach() -> None:
    page = " ".join((ROOT / "docs" / "ladder.md").read_text().split())

    def losses(name: str) -> list[float]:
        found = [measured_again(work, "removals").get(name) for work in WORK]
        return sorted(step["gain"]["value"] for step in found if step and step["gain"])

    assert max(losses("mixed precision")) < 0.34
    assert "keeps less than a third of its speed, or a third" in page
    for name, words in (
        ("batch size", "{:.2f}× to {:.2f}×"),
        ("packing", "({:.2f}× and {:.2f}× without)"),
        ("attention kernel", "no scores in memory ({:.2f}×)"),
        ("torch.compile", "the compiler ({:.2f}× to {:.2f}×)"),
        ("fused AdamW", "fused AdamW ({:.2f}× to {:.2f}×)"),
    ):
        found = losses(name)
        assert words.format(*dict.fromkeys((found[0], found[-1]))) in page, name
    little = ("TF32", "pinned memory", "loader workers", "cuDNN benchmark")
    assert all(abs(loss - 1) < 0.015 for name in little for loss in losses(name))
    small = [loss for name in ("set_to_none", "persistent workers") for loss in losses(name)]
    assert min(small) > 0.975
    for work in ("nli-deberta", "nli-gemma"):
        climb = {step["name"]: step for step in WORK[work]["ladder"]["steps"]}
        assert climb["mixed precision"]["gain"]["high"] < 1
        assert climb["grouping by length"]["gain"]["high"] < 1
        rows = measured_again(work, "rows")
        assert rows["grouping by length"]["gain"]["low"] > 1
        for name in ("batch size", "torch.compile"):
            if name in rows:
                pair = [one[name]["samples_per_second"]["value"] for one in (rows, climb)]
                assert abs(pair[0] / pair[1] - 1) < 0.02
