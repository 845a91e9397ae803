"""The benchmarks run at their tiny size, and write down what they promise to."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, folder: Path, *words: str | Path) -> str:
    """What the script prints, in this folder, on one core and without a GPU."""
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *words],
        cwd=folder,
        env=os.environ | here | {"TRAINFIT_CACHE": str(folder / "cache")},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout


@pytest.mark.soak
def test_a_plain_script_with_and_without_padding(tmp_path: Path):
    cases = ["bert", "deberta"]
    if importlib.util.find_spec("sentence_transformers"):
        cases.append("cross-encoder")
    out = tmp_path / "unpadded.json"
    run("unpadded.py", tmp_path, "--tiny", "--out", out, "--only", *cases)
    [record] = json.loads(out.read_text())["records"]
    assert not [row["error"] for row in record["rows"] if "error" in row]
    assert len(record["summary"]) == 4 * len(cases)
    for line in record["summary"]:
        assert line["times"] > 0
        assert line.get("largest_difference", 0.0) < 1e-4


@pytest.mark.soak
def test_estimated_gains_beside_measured_ones(tmp_path: Path):
    out = tmp_path / "what_if.json"
    run("what_if.py", tmp_path, "--tiny", "--out", out, "--models", "bert-base", "gpt2")
    rows = json.loads(out.read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    assert {row["change"] for row in rows} >= {"fused", "unpadded", "attention", "checkpointing"}
    assert all(row["predicted"] > 0 for row in rows if row["change"] in ("fused", "unpadded"))


@pytest.mark.soak
def test_fine_tuning_beside_the_peers(tmp_path: Path):
    output = tmp_path / "nli.json"
    run("nli.py", tmp_path, "--tiny", "--output", output)
    contenders = json.loads(output.read_text())["models"][0]["contenders"]
    assert {"trainfit", "trainer defaults", "lightning, batch 32"} <= contenders.keys()
    for name, found in contenders.items():
        errors = [each["error"] for each in found["rounds"] if "error" in each]
        assert not errors, name
        [only] = found["rounds"]
        assert only["steps"] == 4
        assert only["samples_per_second"] > 0


@pytest.mark.soak
def test_losses_are_those_of_trainer_where_nothing_is_left_to_luck(tmp_path: Path):
    output = tmp_path / "curves.json"
    run("nli.py", tmp_path, "--tiny", "--curves", "--exact", "--output", output)
    record = json.loads(output.read_text())
    assert [curve["seed"] for curve in record["curves"]] == [0, 1, 2]
    for curve in record["curves"]:
        assert len(curve["trainfit"]) == 12
        assert len(set(curve["trainfit"])) == 12
        assert curve["trainfit"] == pytest.approx(curve["trainer"], rel=1e-6)
    [summary] = record["curve_summaries"]
    assert [spread["within_wider"] for spread in summary["spreads"]] == [12, 12]


@pytest.mark.soak
def test_what_the_receipt_costs(tmp_path: Path):
    output = tmp_path / "receipt.json"
    words = ("--tiny", "--steps", "25", "--rounds", "2", "--output", output)
    run("receipt.py", tmp_path, *words)
    found = json.loads(output.read_text())["results"]["tiny"]
    assert [len(found[name]) for name in ("with_seconds", "without_seconds")] == [2, 2]
    assert all(seconds > 0 for seconds in found["with_seconds"] + found["without_seconds"])


def test_curves_are_held_against_the_spread_of_their_seeds():
    loss_curves = importlib.import_module("loss_curves")
    curves = [
        {"trainfit": [1.0, 4.0, 2.0], "trainer": [1.0, 1.0, 8.0]},
        {"trainfit": [3.0, 4.5, 2.0], "trainer": [3.5, 1.0, 4.0]},
    ]
    single = loss_curves.compare(curves, 1)
    assert single == {
        "window": 1,
        "steps": 3,
        "within_trainfit": 1,  # means 2 and 2.25, 4.25 and 1, 2 and 6; ranges 2, 0.5 and 0
        "beyond_trainfit": {"step": 3, "by": 4.0},
        "within_trainer": 2,  # ranges 2.5, 0 and 4
        "beyond_trainer": {"step": 2, "by": 3.25},
        "within_wider": 2,
        "beyond_wider": {"step": 2, "by": 2.75},
    }
    assert loss_curves.smoothed([1.0, 2.0, 6.0, 1.0], 2).tolist() == [1.0, 1.5, 4.0, 3.5]
    assert loss_curves.compare(curves, 3)["steps"] == 3


@pytest.mark.soak
def test_everyone_on_the_same_work(tmp_path: Path):
    """In one command without a word behind it; where there is no GPU, of tiny shapes."""
    printed = run("peers.py", tmp_path)
    [output] = (tmp_path / "runs").glob("peers-*.json")
    models = json.loads(output.read_text())["models"]
    assert [model["workload"] for model in models] == ["nli", "gpt"]
    for model in models:
        contenders = model["contenders"]
        assert {"trainfit", "trainer, batch 8", "lightning, batch 8"} <= contenders.keys()
        assert "plain loop, batch 8" in contenders
        for name, found in contenders.items():
            rates = [each["samples_per_second"] for each in found["rounds"]]
            assert len(rates) == 2, name
            assert found["range"] == [min(rates), max(rates)]
            assert f"\n{name} " in printed


@pytest.mark.soak
@pytest.mark.parametrize("job", ["bert", "gpt124"])
def test_a_whole_job_by_the_clock(tmp_path: Path, job: str):
    words = (
        "--tiny",
        "--rounds",
        "1",
        "--out",
        tmp_path / "jobs.json",
        "--scratch",
        tmp_path / "s",
    )
    run("jobs.py", tmp_path, job, *words)
    [record] = json.loads((tmp_path / "jobs.json").read_text())["records"]
    assert [one["who"] for one in record["runs"]] == ["trainfit", "trainer"]
    for one in record["runs"]:
        assert 0 < one["first_update_seconds"] < one["seconds"]
        assert sum(one["stages"].values()) == pytest.approx(one["seconds"], rel=0.3)


@pytest.mark.soak
def test_a_head_beside_trainer(tmp_path: Path):
    words = ("--tiny", "--out", tmp_path / "heads.json", "--scratch", tmp_path / "s")
    names = ["trainfit", "trainfit-long", "grouped"]
    run("heads.py", tmp_path, "multilabel", "bert", *words, "--settings", *names)
    [record] = json.loads((tmp_path / "heads.json").read_text())["records"]
    assert [one["setting"] for one in record["runs"]] == names
    for one in record["runs"]:
        assert one["timed_steps"] >= 40
        assert one["samples_per_second"] > 0
        assert one["losses"][-1] < one["losses"][0]
    *ours, theirs = (one["samples_per_second"] for one in record["runs"])
    times = [rate / theirs for rate in ours]
    assert list(record["times_as_fast"].values()) == pytest.approx(times)


def test_heads_are_compared_by_trainers_fastest_and_trainfits_slowest():
    heads = importlib.import_module("head_tables")

    def record(*rates: float, **more: Any) -> dict[str, Any]:
        names = ("trainfit", "trainfit-long", "padded", "grouped")
        runs = [
            {"setting": name, "samples_per_second": rate}
            for name, rate in zip(names, rates, strict=True)
        ]
        failed = {"setting": "compiled", "error": "exit 1"}
        return {"title": "T", "model": "bert-base", "tiny": False, "runs": [*runs, failed], **more}

    found = [
        record(900, 1100, 300, 400),
        record(800, 1000, 350, 380),
        record(9, 9, 9, 9, tiny=True),
    ]
    theirs, short, long = "400 (grouped by length)", "**800 to 900**", "**1,000 to 1,100**"
    row = f"| T | BERT-base | {theirs} | {short} | 2.0× | {long} | 2.5× |"
    assert row in heads.head_speeds(found)
    assert heads.head_speeds([]) == ""


def test_ratings_become_signs_and_parts(tmp_path: Path):
    import io
    import tarfile

    real_data = importlib.import_module("real_data")

    def packed(path: str, content: bytes) -> bytes:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w:gz") as archive:
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        return made.getvalue()

    lines = "1\t2.3\tgood\r\n2\t-0.6\tbad\tworse\r\n3\t0.0\tneither\r\n4\t0.1\tfair\r\n"
    inner = packed("x/movieReviewSnippets_GroundTruth.txt", lines.encode())
    outer = tmp_path / "source.tar.gz"
    outer.write_bytes(packed("source/hutto_ICWSM_2014.tar.gz", inner))
    rows = real_data.read_ratings(outer)
    assert rows == [("good", "positive"), ("bad\tworse", "negative"), ("fair", "positive")]
    paths = real_data.write_parts(list(rows), tmp_path, {"train": 2, "test": 1})
    read = [line for path in paths.values() for line in Path(path).read_text().splitlines()[1:]]
    assert sorted(read) == sorted(",".join(row) for row in rows)


@pytest.mark.parametrize("nested", [True, False])
def test_the_trainer_script_gets_the_samples_that_trainfit_takes(tmp_path: Path, nested: bool):
    from trainfit.jobs import nli
    from trainfit.jobs.configuration import configure

    files = importlib.import_module("job_files")
    data, model = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    words = ["cv.folds=3", "data.negative_ratio=2"]
    spec = {"scale": "small", "posts": 60, "tiny": True, "kind": "pairs"}
    spec |= {"nested": nested, "data_words": words}
    files.write_posts(data, spec)
    files.write_model(model, "bert-base", files.read_texts(data, spec), tiny=True)
    asked = [*words, f"data.data_dir={data}", f"model.name={model}", "data.max_length=64"]
    prepared = nli.prepare(configure("nli", asked), nested=nested)
    dealt = files.pair_parts(data, spec)["folds"]
    assert len(dealt) == len(prepared.datasets) == 3
    for part, dataset in zip(dealt, prepared.datasets, strict=True):
        for name in ("train", "validation", "test"):
            tokens = getattr(dataset, name)
            assert part[name] == (9 * tokens.groups + tokens.criteria).tolist()


def test_whole_jobs_are_compared_by_trainers_fastest_and_trainfits_slowest(tmp_path: Path):
    tables = importlib.import_module("job_tables")

    def one(who: str, cache: str, seconds: float, **stages: float) -> dict[str, Any]:
        return {"who": who, "cache": cache, "seconds": seconds, "stages": stages}

    runs = [
        one("trainfit", "cold", 100.0, steps=80.0, plan=5.0),
        one("trainer", "cold", 240.0, steps=200.0),
        one("trainfit", "warm", 80.0, steps=60.0, judge=9.0),
        one("trainer", "warm", 220.0, steps=200.0),
        one("trainer", "warm", 1.0) | {"error": "exit 1"},
    ]
    record = {"job": "bert", "title": "BERT", "tiny": False, "hardware": "H200", "runs": runs}
    halves = [{**record, "runs": runs[:2]}, {**record, "runs": runs[2:]}, {**record, "tiny": True}]
    path = tmp_path / "2026-01-01-time-to-result-h200.json"
    path.write_text(json.dumps({"records": halves}))
    found = tables.records(tmp_path)
    assert "| BERT | **100** | **80** | 240 | 220 | 2.2× |" in tables.whole_jobs(found)
    assert tables.outside(runs[0]) == pytest.approx(0.2)
    assert tables.grouped(runs[2]) == pytest.approx(
        dict.fromkeys(tables._GROUPS, 0.0) | {"steps": 60.0, "evaluation": 9.0, "rest": 11.0}
    )
    drawn = tables.draw(found)
    assert "80 s" in drawn
    assert "240 s" not in drawn  # the last round is drawn


@pytest.mark.soak
def test_packed_rows_by_the_memory_efficient_kernel(tmp_path: Path):
    out = tmp_path / "packed.json"
    run("packed_efficient.py", tmp_path, "--tiny", "--steps", "2", "--rounds", "1", "--out", out)
    [row] = json.loads(out.read_text())["rows"]  # a CPU has no other kernel
    assert row["arm"] == "padded"
    assert len(row["seconds"]) == 2


@pytest.mark.soak
@pytest.mark.parametrize("method", ["full", "lora"])
def test_gemma_in_fp16_beside_other_precisions(tmp_path: Path, method: str):
    out = tmp_path / "gemma.json"
    run("gemma_fp16.py", tmp_path, "--tiny", "--method", method, "--out", out)
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert max(rows["fp32"]["largest"]["blocks"]) > 65_504
    assert rows["fp16"]["not_finite"] == rows["fp16"]["gradients_not_finite"] == 0
    assert rows["fp16"]["gradient_error"] < rows["bf16"]["gradient_error"]
    assert rows["fp16_plain"]["not_finite"] > 0


@pytest.mark.soak
def test_plans_under_caps_are_made_and_run(tmp_path: Path):
    plans, out = tmp_path / "plans.json", tmp_path / "more.json"
    cases = ["--case", "gemma-1b full", "7b qlora"]
    run("more_model.py", tmp_path, "--predict", plans, "--tiny", *cases)
    made = json.loads(plans.read_text())["plans"]
    assert [one["fits"] for one in made] == [True, True]
    assert made[1]["savers"]["quantization"] == "nf4"
    run("more_model.py", tmp_path, "--run", plans, "--output", out, "--tiny", "--steps", "4")
    run("more_model.py", tmp_path, "--losses", "--output", out, "--tiny")
    record = json.loads(out.read_text())
    assert not [row["error"] for row in record["results"] if "error" in row]
    assert all(row["samples_per_second"] > 0 for row in record["results"])
    assert len(record["losses"]) == 3 * 6
    assert len(record["commands"]) == 2


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_random_plans_are_run_in_two_calls(tmp_path: Path):
    plans, out = tmp_path / "plans.json", tmp_path / "more.json"
    run("more_model.py", tmp_path, "--predict", plans, "--tiny", "--random", "5")
    again = ["--run", plans, "--output", out, "--tiny", "--random", "5"]
    run("more_model.py", tmp_path, *again, "--seconds", "0")
    assert len(json.loads(out.read_text())["results"]) == 1
    run("more_model.py", tmp_path, *again)
    record = json.loads(out.read_text())
    assert len({row["name"] for row in record["results"]}) == 5
    assert record["summary"]["said to fit"] == record["summary"]["of these ran"] == 4
    assert record["summary"]["failed for other reasons"] == 0
