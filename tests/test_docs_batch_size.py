"""The figures of docs/batch-size.md are the recorded ones."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "benchmarks/results/2026-11-15-finder-h200.json").read_text())
AGAIN = json.loads((ROOT / "benchmarks/results/2026-11-15-finder-8gib-h200.json").read_text())
PAGE = (ROOT / "docs" / "batch-size.md").read_text()
TEXT = " ".join(PAGE.split())


def table(first_column: str) -> list[str]:
    """The rows of the table whose first column is called so."""
    [rows] = re.findall(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return rows.splitlines()


def test_the_finders_figures_are_the_recorded_ones():
    expected = []
    for row in RECORD["finder"]:
        found, truth = row["finder"], row["truth"]
        memory = "whole GPU" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB"
        rows = f"{found['largest_rows']} | {truth['largest_rows']} | {len(found['probes'])}"
        expected.append(
            f"| {memory} | {rows} | {found['ooms']} | {found['seconds_after_build']:.1f} |"
        )
    assert sorted(table("memory")) == sorted(expected)


def test_lightnings_figures_are_the_recorded_ones():
    expected = {
        mode: f"{found['largest_rows']} | {found['ooms']} | {found['seconds_after_build']:.1f} |"
        for mode, found in RECORD["lightning"].items()
    }
    shown = table("mode")
    assert len(shown) == len(expected)
    for row, (mode, figures) in zip(shown, expected.items(), strict=True):
        assert row.startswith(f"| {mode}")
        assert row.endswith(f"| {figures}")


def test_what_is_said_beside_the_tables_is_recorded():
    whole = RECORD["finder"][0]["finder"]
    before = whole["seconds"] - whole["seconds_after_build"]
    assert f"another {before:.1f} s on the whole GPU" in TEXT
    again = {case["cap_gib"]: case["largest_rows"] for case in RECORD["replayed"]["cases"]}
    said = f"give {again[8]} rows, and {again[None]}, {again[24]} and {again[16]} as before"
    assert said in TEXT
    assert f"torch {'.'.join(RECORD['versions']['torch'].split('.')[:2])}" in TEXT
    assert f"on an {RECORD['hardware'].removeprefix('NVIDIA ')} " in TEXT
    assert RECORD["command"] in TEXT


def test_what_was_measured_again_is_recorded():
    [row] = AGAIN["finder"]
    found = row["finder"]
    assert row["cap_gib"] == 8
    assert f"another process on {found['used_by_others_gib']:.1f} GiB" in TEXT
    rows = f"{found['largest_rows']} rows found, {row['truth']['largest_rows']} in truth"
    rest = f"{len(found['probes'])} probes, {found['ooms']} out of memory"
    assert f"{rows}, {rest}, {found['seconds_after_build']:.1f} s" in TEXT
