"""The commands and links that README and docs show are real."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from job_tiny import write_redsm5
from tokenizer_folders import tokenizer_folder
from trainfit.cli.main import COMMANDS, run

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def files(page: str) -> list[tuple[str, str]]:
    """Blocks with a title are files that the page's other blocks import."""
    [path] = [path for path in PAGES if path.name == page]
    found: list[tuple[str, str]] = re.findall(
        r'```python title="([\w.]+)"\n(.*?)```', path.read_text(), re.DOTALL
    )
    return found


SHOWN = [
    (page.name, line.split("  #")[0].strip())
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("trainfit ")
]


SLOW = {
    "write-a-task.md",
    "batch-size.md",
    "trainfit plan gpt --gpu a30 --model gpt-small",
    "trainfit plan nli --gpu 4090 --model bert-base model.method=full training.batch_size=20 "
    "model.use_gradient_checkpointing=true",
}
"""Pages with scripts, and commands, that plan or train for many seconds."""


def params(shown: list[tuple[str, str]]) -> list[Any]:
    """What is slow runs with `make soak`."""
    return [
        pytest.param(*each, marks=[pytest.mark.soak] if SLOW & set(each) else []) for each in shown
    ]


@pytest.mark.usefixtures("tiny_default")
@pytest.mark.parametrize(("page", "line"), params(SHOWN))
def test_a_shown_command_runs(page: str, line: str, capsys: pytest.CaptureFixture[str]):
    assert run(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_commands_are_shown_at_all():
    assert len(SHOWN) > 10
    assert all((ROOT / "docs" / f"{name}.md").exists() for name in COMMANDS)


SESSIONS = [
    (page.name, block)
    for page in PAGES
    for block in blocks(page, "console")
    if "$ trainfit" in block
]


@pytest.mark.parametrize(("page", "block"), SESSIONS)
def test_a_shown_answer_is_the_real_one(page: str, block: str, capsys: pytest.CaptureFixture[str]):
    command, _, answer = block.partition("\n")
    run(shlex.split(command)[2:])
    captured = capsys.readouterr()
    assert captured.out + captured.err == answer


PYTHON = [(page.name, block) for page in PAGES for block in blocks(page, "python")]
ON_REDSM5 = [(page, block) for page, block in PYTHON if "data/redsm5" in block]
"""Scripts that need the data and a model's tokenizer in the working folder."""


@pytest.mark.parametrize(("page", "block"), ON_REDSM5)
def test_shown_python_runs_on_redsm5_files(page: str, block: str, tmp_path: Path):
    write_redsm5(tmp_path / "data" / "redsm5", posts=100)
    tokenizer_folder(tmp_path / "google" / "gemma-2-2b", "gemma")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert page == "hardware-optimizer.md"
    assert "DataLoader over 50 batches:" in done.stdout
    assert "ms per batch" in done.stdout


@pytest.mark.usefixtures("tiny_default")
@pytest.mark.parametrize(
    ("page", "block"), params([each for each in PYTHON if each not in ON_REDSM5])
)
def test_shown_python_runs(
    page: str,
    block: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    from trainfit import undo
    from trainfit.runtime import switches

    for name, text in files(page):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {})
    while switches._in_force:
        undo(switches._in_force[-1][0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_figures_that_the_readme_gives_are_right():
    from trainfit.conf import options
    from trainfit.hardware.catalogue import gpus

    text = (ROOT / "README.md").read_text()
    assert f"catalogue of {len(gpus())} GPUs" in text
    assert f"presets for {len(options('nli', 'hardware')) - 1} kinds of hardware" in text


def test_the_readmes_measurements_are_the_recorded_ones():
    path = ROOT / "benchmarks" / "results" / "2026-11-15-check-h200.json"
    items = json.loads(path.read_text())["result"]["measured"]["items"]
    values = {item["name"]: item["value"] for item in items}
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"\| matrix products in (\w+), TFLOP/s \| ([\d.]+) \| ([\d.]+) \|", text)
    assert len(rows) == 4
    for kind, burst, sustained in rows:
        assert float(burst) == pytest.approx(values[f"matmul_{kind}"], rel=0.01)
        assert float(sustained) == pytest.approx(values[f"matmul_{kind}_sustained"], rel=0.01)
    [copy] = re.findall(r"\| copies in memory, GB/s \| ([\d.]+) \|", text)
    assert float(copy) == pytest.approx(values["copy"], rel=0.01)


def test_the_estimators_figures_are_the_recorded_ones():
    path = ROOT / "benchmarks" / "results" / "2026-11-15-estimator-predicted.json"
    record = json.loads(path.read_text())
    eager, compiled = record["eager"], record["compiled"]
    page = " ".join((ROOT / "docs" / "estimate.md").read_text().split())
    assert eager["cases"] == eager["allocated_within_2_percent"]
    assert f"within 2% in all {eager['cases']}" in page
    assert f"within 0.1% in {eager['allocated_within_0.1_percent']}" in page
    assert f"within 5% in {eager['reserved_within_5_percent']}" in page
    assert compiled["cases"] == compiled["allocated_within_1_percent"]
    assert f"within 1% in all {compiled['cases']}" in page
    assert f"within 5% in {compiled['reserved_within_5_percent']}" in page
    from trainfit.planning.estimator.estimate import recorded_error

    assert recorded_error("9.0") == pytest.approx(
        eager["largest_allocated_error_percent"], abs=0.05
    )
    assert recorded_error("9.0", compiled=True) >= compiled["largest_allocated_error_percent"]


def test_the_planners_figures_are_the_recorded_ones():
    results = ROOT / "benchmarks" / "results"
    time = json.loads((results / "2026-11-15-time-h200.json").read_text())
    runs = json.loads((results / "2026-11-15-capped-h200.json").read_text())["results"]
    page = " ".join((ROOT / "docs" / "plan.md").read_text().split())
    assert f"the same {time['cases']} steps" in page
    assert f"{time['within_20_percent']} within 20%" in page
    assert f"nine in ten within {time['nine_in_ten_percent']:.1f}%" in page
    predicted = json.loads((results / "2026-11-15-estimator-predicted.json").read_text())
    readme = (ROOT / "README.md").read_text()
    eager, compiled = predicted["eager"], predicted["compiled"]
    ran = [run for run in runs if "error" not in run]
    for row in (
        f"eager steps | {eager['cases']} | {eager['allocated_within_2_percent']} | 2% |",
        f"compiled steps | {compiled['cases']} | {compiled['allocated_within_1_percent']} | 1% |",
        f"eager steps | {eager['cases']} | {eager['reserved_within_5_percent']} | 5% |",
        f"out of the fit | {time['cases']} | {time['within_20_percent']} | 20% |",
        f"ran 20 steps | {len(runs)} | {len(ran)} | the cap |",
    ):
        assert row in readme
    assert f"{len(ran)} of {len(runs)} without running out" in page
    for done in ran:
        promised = done["case"]["memory"]["peak_allocated_gib"] * 2**30
        assert abs(promised / done["peak_allocated"] - 1) < 0.03, done["name"]


def test_the_speeds_are_the_recorded_ones():
    record = json.loads((ROOT / "benchmarks/results/2026-11-15-nli-h200.json").read_text())
    found: dict[str, dict[str, list[float]]] = {}
    rounds: dict[str, list[float]] = {}
    for model in record["models"]:
        rates = found.setdefault(model["model"], {})
        for name, contender in model["contenders"].items():
            if "samples_per_second" in contender:
                rates.setdefault(name, []).append(contender["samples_per_second"])
            if name.startswith("trainer,"):
                good = [each for each in contender["rounds"] if "error" not in each]
                rounds.setdefault(model["model"], []).extend(r["samples_per_second"] for r in good)
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/speed.md")]
    for model, title in (
        ("deberta-v3-base", "DeBERTa-v3-base"),
        ("modernbert-base", "ModernBERT-base"),
        ("bert-base", "BERT-base"),
        ("gemma-3-1b-it", "Gemma-3-1B"),
    ):
        rates = found[model]
        own = sorted({f"{rate:,.0f}" for rate in rates["trainfit"]})
        best = max(rounds[model])
        for page in pages:
            row = next(line for line in page.splitlines() if line.startswith(f"| {title} "))
            assert f"| {' to '.join(own)} | {best:,.0f}" in row
            if "trainer defaults" in rates:
                assert f"{rates['trainer defaults'][0]:.3g}" in row


def recorded(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"2026-11-15-{name}-h200.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_the_variants_are_the_recorded_ones():
    by_peft, dora, frozen = recorded("nli")["variants"]
    page = words_of("docs/speed.md")
    for title, found in (("DoRA", dora), ("frozen encoder", frozen)):
        assert found["method"] == title.split()[0].lower()
        [measured], planned = found["rounds"], found["planned"]
        rates = [each["samples_per_second"] for each in (measured, planned)]
        gib = [measured["peak_gib"], planned["gib"]]
        assert (
            f"| {title} | {rates[0]:,.0f} | {rates[1]:,.0f} | {gib[0]:.1f} | {gib[1]:.1f} |" in page
        )
    [own] = by_peft["rounds"]
    assert f"it made {own['samples_per_second']:.0f} in {own['peak_gib']:.1f} GiB" in page


def test_the_loss_curves_are_judged_as_recorded():
    loss_curves = importlib.import_module("loss_curves")
    record = recorded("curves")
    curves, [said] = record["curves"], record["curve_summaries"]
    assert said == {"model": "bert-base", **loss_curves.summary(curves)}
    page = words_of("docs/speed.md")
    single, smooth = said["spreads"]
    for title, found in (("mean of the last ten", smooth), ("each", single)):
        counts = " | ".join(str(found[f"within_{who}"]) for who in ("wider", "trainer", "trainfit"))
        assert re.search(rf"\| {title} [a-z ]*\| {re.escape(counts)} \|", page)
    beyond, worst = single["beyond_wider"], smooth["beyond_trainfit"]
    assert "beyond_wider" not in smooth
    assert f"leave it by {beyond['by']:.2f} at the most, at step {beyond['step']}" in page
    assert worst["by"] > smooth["beyond_trainer"]["by"]
    assert f"by {worst['by']:.2f} at the most, at step {worst['step']}" in page
    ours, theirs = said["trainfit"], said["trainer"]
    ends = [f"{min(who['last_30']):.4f} to {max(who['last_30']):.4f}" for who in (ours, theirs)]
    assert f"{ends[0]} over the last 30 steps, Trainer {ends[1]}" in page
    means = ["{:.3f}, {:.3f} and {:.3f}".format(*who["mean_losses"]) for who in (ours, theirs)]
    assert f"({means[0]} against {means[1]})" in page
    for seed in (*curves, *recorded("nli")["curves"]):
        assert sum(seed["trainfit"]) < sum(seed["trainer"]), "the lead is in every seed"


def test_the_picture_of_the_curves_is_drawn_from_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    loss_curves = importlib.import_module("loss_curves")
    result = ROOT / "benchmarks/results/2026-11-15-curves-h200.json"
    words = ["loss_curves.py", str(result), "--picture", str(tmp_path / "curves.svg")]
    monkeypatch.setattr(sys, "argv", words)
    loss_curves.main()
    shown = ROOT / "docs" / "2026-11-15-curves-h200.svg"
    assert (tmp_path / "curves.svg").read_text() == shown.read_text()


def test_the_trials_per_hour_are_the_recorded_ones():
    record = recorded("hpo")
    found, page = record["summary"], words_of("docs/hpo.md")
    ours, theirs = found["trainfit"], found["peer"]
    for key in ("trials_per_hour", "trials_per_hour_warm"):
        row = f"| {ours[key]:.0f} | {theirs[key]:.0f} | {found[f'times_{key}']:.2f} |"
        assert row in page
    readme = words_of("README.md")
    pairs = [[f"{who[key]:.0f}" for who in (ours, theirs)] for key in ours]
    assert f"runs {pairs[0][0]} trials per hour, and {pairs[0][1]} when" in readme
    assert f"; {pairs[1][0]} and {pairs[1][1]} after the first trial" in readme
    plans = [plan["seconds"] for plan in record["plans"]]
    assert f"with {found['planning_seconds']:.0f} s of planning | | | " in page
    assert f"the first in {plans[0]:.0f} s and the others in {plans[1]:.0f}" in page
    assert round(plans[1]) == round(plans[2])
    assert plans[3] < 0.1, "made before"
    seconds = {who: [t["seconds"] for t in record[who]] for who in ("trainfit", "peer")}
    later = {who: sum(each[1:]) / len(each[1:]) for who, each in seconds.items()}
    four = sum(seconds["peer"]) / (sum(plans) + sum(seconds["trainfit"]))
    fifty = (seconds["peer"][0] + 49 * later["peer"]) / (
        sum(plans) + seconds["trainfit"][0] + 49 * later["trainfit"]
    )
    assert f"of planning | | | {four:.2f} |" in page
    assert f"at the later ones' pace | | | {fifty:.2f} |" in page
    assert (
        f"took {seconds['trainfit'][0]:.1f} s and Trainer's {seconds['peer'][0]:.1f}; the later "
        f"ones {later['trainfit']:.1f} and {later['peer']:.1f} on average"
    ) in page


def test_where_a_trials_time_and_memory_go_is_as_recorded():
    record, page = recorded("hpo"), words_of("docs/hpo.md")
    shares = {
        name: f"{100 * s:.0f}%" for name, s in record["summary"]["shares_of_later_trials"].items()
    }
    assert f"{shares['training']} is training, {shares['evaluation']} evaluation" in page
    assert f"and {shares['beginning']} building" in page
    data = record["data"]
    sizes = f"{data['train'][0]:,} pairs of {data['mean_length']:.0f} tokens on average"
    assert f"({sizes}, evaluated on {data['validation'][0]:,})" in page
    assert record["peer_setting"] == "grouped by length, batch 64"
    assert all(trial["outcome"] == "complete" for trial in record["trainfit"])
    memory = record["memory"]
    assert memory["after"]["before"]["reason"].startswith("out of memory")
    fresh, after = (memory[which]["at_start"] for which in ("fresh", "after"))
    more = {name: after[name] - fresh[name] for name in fresh}
    assert f"with {more['allocated_mib']:.0f} MiB more allocated and" in page
    assert f"{more['reserved_mib']:.0f} MiB more reserved than one in a fresh process" in page
    assert f"of {fresh['allocated_mib']:,.0f} and {fresh['reserved_mib']:,.0f}:" in page
    outside = more["used_on_the_device_mib"] - more["reserved_mib"]
    shown = f"shows {more['used_on_the_device_mib']:.0f} MiB more, so {outside:.0f} MiB are outside"
    assert shown in page


@pytest.mark.parametrize("model", ["gemma", "bert"])
def test_the_profile_on_the_page_is_the_recorded_one(model: str):
    record = json.loads(
        (ROOT / f"benchmarks/results/2026-11-15-{model}-profile-h200.json").read_text()
    )
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())

    def milliseconds(word: str) -> float:
        return sum(each["ms"] for each in record["kernels"] if word in each["name"])

    shares = {
        word: round(100 * milliseconds(word) / record["total_ms"])
        for word in ("nvjet", "flash", "gelu", "pow", "multi_tensor", "layer_norm")
    }
    products = milliseconds("nvjet") / 1e3
    rate = 6 * record["product_parameters"] * record["tokens"] / products / 1e12
    alone = record["sequences"] / products
    if model == "bert":
        assert f"{shares['nvjet']}% is matrix products at {rate:.0f} TFLOP/s, attention" in page
        assert f"takes {shares['flash']}%, dropout with the norms {shares['layer_norm']}%" in page
        assert f"GELU {shares['gelu']}%" in page
        assert f"the products alone allow {alone:,.0f}" in page
        return
    assert f"{shares['nvjet']}% of a step is matrix products at {rate:.0f} TFLOP/s" in page
    assert f"heads of 256 takes {shares['flash']}%, GELU {shares['gelu']}%" in page
    assert f"norms in float32 {shares['pow']}%" in page
    assert f"update {shares['multi_tensor']}%" in page
    assert f"allow {alone:.0f} samples/s" in page
