"""The figures of docs/gpt.md are those of the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def test_the_other_gpu_and_the_power_that_holds_it_back() -> None:
    small, medium = recorded(2), recorded(3)
    ends = [small["nanoGPT-style"], small["+ own GELU (trainfit)"]]
    ends += [small["trainfit, twice the batch"], medium["+ own GELU (trainfit)"]]
    ends.append(medium["nanoGPT-style"])
    told = re.search(
        r"nanoGPT-style loop made (.*)\n*", PAGE[PAGE.index("H200s differ") :], re.DOTALL
    )
    assert told is not None
    assert re.findall(r"\d\d\.\d%", told[1])[:5] == [f"{one['mfu']:.1%}" for one in ends]
    gpus = [one["gpu"] for one in (*small.values(), *medium.values())]
    assert all(gpu["power_limit_w"] == 700 and 679 < gpu["power_w"] < 698 for gpu in gpus)
    assert all(1620 < gpu["clock_sm_mhz"] < 1690 for gpu in gpus)
    for gpu in gpus:
        held, of = re.findall(r"power cap in (\d+) of (\d+)", gpu["notices"][0])[0]
        assert held == of


def test_the_readme() -> None:
    told = (ROOT / "README.md").read_text()
    everyone = recorded(0) | recorded(1)
    for name in ("+ own GELU (trainfit)", "nanoGPT-style", "transformers"):
        one = everyone[name]
        found = re.search(rf"{one['tokens_per_second']:,.0f}[^\d]*\({one['mfu']:.1%}", told)
        assert found is not None, name
