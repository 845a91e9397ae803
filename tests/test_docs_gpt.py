"""The figures of docs/gpt.md are those of the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/gpt.md").read_text()
RECORD = json.loads((ROOT / "benchmarks/results/2026-11-15-gpt-h200.json").read_text())
NAMES = {
    "transformers' GPT-2, compiled": "transformers",
    "nanoGPT-style loop, compiled": "nanoGPT-style",
}


def recorded(run: int) -> dict[str, Any]:
    return {one["name"]: one for one in RECORD["runs"][run]["results"]}


@pytest.mark.parametrize(
    "line", [line for line in PAGE.splitlines() if re.match(r"\|.*\d% \| [\d.]+ \|$", line)]
)
def test_a_line_of_the_table(line: str) -> None:
    name, *figures = (cell.strip() for cell in line.strip("|").split("|"))
    one = (recorded(0) | recorded(1))[NAMES.get(name, name)]
    assert figures == [
        f"{1e3 * one['seconds']:.1f}",
        f"{one['tokens_per_second']:,.0f}",
        f"{one['mfu']:.1%}",
        f"{one['peak_allocated_gib']:.1f}",
    ]
    tokens = one["settings"]["batch"] * 1024
    assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"])
    # 6 N + 12 L H Q T by hand: N has no positions, and its output layer is the embedding.
    weights = 50304 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    per_token = 6 * weights + 12 * 12 * 768 * 1024
    assert one["mfu"] == pytest.approx(one["tokens_per_second"] * per_token / 989e12, rel=1e-3)


def test_the_table_has_everyone() -> None:
    assert len(re.findall(r"\|.*\d% \| [\d.]+ \|\n", PAGE)) == 7


def test_where_the_time_goes() -> None:
    kernels = recorded(1)["+ own GELU (trainfit)"]["kernels"]

    def total(*words: str) -> float:
        return sum(one["ms"] for one in kernels if any(word in one["kernel"] for word in words))

    products = total("nvjet", "splitK")
    assert f"take {sum(one['ms'] for one in kernels):.1f} ms" in PAGE
    assert f"{products:.1f} ms of them\nare matrix products" in PAGE
    per_token = 6 * (50304 * 768 + 12 * 12 * 768**2)
    assert f"({65536 * per_token / products / 1e9:.0f} TFLOP/s)" in PAGE
    assert f"{total('cudnn'):.1f} attention" in PAGE
    gelu = sum(one["ms"] for one in kernels if one["kernel"] in ("_forward", "_backward"))
    assert f"{gelu:.1f} GELU and {total('layer_norm'):.1f} norms" in PAGE
    assert f"{total('_row'):.1f}\nthe loss" in PAGE


LINES = {
    "| small | 64 |": (2, "nanoGPT-style", "+ own GELU (trainfit)"),
    "| small | 512 in 4 parts |": (
        2,
        "nanoGPT-style, 8 times the batch in 4 parts",
        "trainfit, 8 times the batch in 4 parts",
    ),
    "| medium | 64 |": (3, "nanoGPT-style", "+ own GELU (trainfit)"),
}


@pytest.mark.parametrize(("begin", "who"), LINES.items())
def test_a_line_of_the_other_gpu(begin: str, who: tuple[int, str, str]) -> None:
    run, *names = who
    ends = [recorded(run)[name] for name in names]
    rates = [f"{one['tokens_per_second']:,.0f} tokens/s, {one['mfu']:.1%}" for one in ends]
    peaks = ", ".join(f"{one['peak_allocated_gib']:.1f}" for one in ends)
    assert f"{begin} {rates[0]} | {rates[1]} | {peaks} |" in PAGE
    for one in ends:
        tokens = one["settings"]["batch"] * 1024
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"])


def test_the_power_that_holds_it_back() -> None:
    gpus = [one["gpu"] for run in (2, 3) for one in recorded(run).values() if "gpu" in one]
    assert all(gpu["power_limit_w"] == 700 and 688 < gpu["power_w"] < 696 for gpu in gpus)
    assert all(1587 <= gpu["clock_sm_mhz"] <= 1653 for gpu in gpus)
    for gpu in gpus:
        held, of = re.findall(r"power cap in (\d+) of (\d+)", gpu["notices"][0])[0]
        assert held == of


def test_the_curve_is_that_of_tf32_within_noise() -> None:
    reference, ours = RECORD["runs"][4]["curves"]
    first, other, mine = (
        np.convolve(losses, np.ones(10) / 10, "valid")
        for losses in (reference["losses"], reference["other_seed"], ours["losses"])
    )
    apart, noise = np.abs(mine - first).max(), np.abs(other - first).max()
    assert apart < noise
    assert f"at most {apart:.2f} away; two seeds of the TF32 run are up\nto {noise:.2f}" in PAGE
    low, high = np.minimum(first, other)[-80:], np.maximum(first, other)[-80:]
    assert np.all((low < mine[-80:]) & (mine[-80:] < high))
    ends = (ours["losses"], reference["losses"], reference["other_seed"])
    told = "ends at {:.2f}, they at {:.2f}\nand {:.2f}"
    assert told.format(*(losses[-1] for losses in ends)) in PAGE


def test_the_readme() -> None:
    told = (ROOT / "README.md").read_text()
    run, *large = LINES["| small | 512 in 4 parts |"]
    everyone = [recorded(run)[name] for name in large]
    everyone += [recorded(3)[name] for name in ("nanoGPT-style", "+ own GELU (trainfit)")]
    everyone += [recorded(0)["transformers"], recorded(1)["+ own GELU (trainfit)"]]
    for one in everyone:
        found = re.search(rf"{one['tokens_per_second']:,.0f}[^\d]*\({one['mfu']:.1%}", told)
        assert found is not None, one["name"]


def test_what_comes_before_is_on_the_ladder() -> None:
    path = ROOT / "benchmarks/results/2026-11-15-tune-h200.json"
    steps = json.loads(path.read_text())["workloads"]["gpt"]["ladder"]["steps"]
    gains = {step["name"]: f"{step['gain']['value']:.2f}×" for step in steps[1:]}
    names = ("TF32", "mixed precision", "fused AdamW", "attention kernel", "batch size")
    told = PAGE[PAGE.index("What comes before a nanoGPT-style loop") :]
    shown = re.findall(r"\d\.\d\d×", told)[:6]
    assert shown == [gains[name] for name in (*names, "torch.compile")]
