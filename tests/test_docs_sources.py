"""docs/sources.md is complete and true, and so are the overrides and figures of docs/tuning.md."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import COMMANDS
from trainfit.conf import SCHEMAS, compose, options
from trainfit.core.errors import BadInput

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "docs" / "sources.md").read_text()
TUNING = (ROOT / "docs" / "tuning.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30

NAMES = {
    "the tuning guide": """
        enable_tf32 enable_amp amp_dtype enable_compile max_length block_size batch_size eval_steps
        logging_steps eval_iters dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True slm_config
        hardware=a30 hardware=gpu_3090 hardware=a100 hardware=gpu_4090 hardware=t4
        hardware=conservative hardware=a40 hardware=v100 hardware=rtx_4080
        torchrun nvidia-smi GPU_TROUBLESHOOTING.md ProcessGroupNCCL mfu
    """,
    "the hardware guide": """
        check-hardware check-gpu nli-train-auto nli-train-4090 nli-train-3090 nli-train-low-mem
        nli-train-cpu train_nli_5fold.py hardware=gpu_4090 hardware=gpu_3090 hardware=gpu_low_mem
        hardware=cpu hardware=auto experiment=nli_full_5fold training.batch_size=20
        optimization.compile=true model.use_gradient_checkpointing model.freeze_encoder
        training.num_workers device.mixed_precision=true device.tf32 device.use_cuda
        optimization.gradient_accumulation_steps optimization.compile_mode=default
        optimization.compile_mode=reduce-overhead optimization.compile_mode=max-autotune
        pin_memory prefetch_factor cudnn_benchmark detect_gpu_info get_recommended_config
        print_hardware_info optimize_pytorch_settings enable_memory_efficient_mode load_redsm5_nli
        get_optimal_num_workers compile_model benchmark_dataloader MemoryTracker gemma-2-2b
    """,
    "the status report": """
        use_bf16 reproducibility.tf32 fused_adamw cudnn_benchmark target_effective_batch_size
        max_grad_norm pin_memory persistent_workers use_torch_compile zero_grad(set_to_none=True)
        hardware=rtx_5090 SDPA packing bucketing
    """,
    "the 3090 document": """
        train_nli_binary.py experiment=rtx3090_optimized device.use_tf32 training.optimizer_type
        data.num_workers data.pin_memory data.prefetch_factor model.use_flash_attention
        model.use_torch_compile training.batch_size=6 data.num_workers=2 device.use_tf32=false
        training.optimizer_type=adamw model.use_flash_attention=false data.num_workers=0
        gemma-3-1b-it gemma-3-4b-it enable_math_sdp
    """,
    "the T4 guide": """
        BATCH_TRAIN BATCH_EVAL GRAD_ACCUM MAX_LENGTH USE_GRADIENT_CHECKPOINTING USE_TORCH_COMPILE
        adamw_torch_fused adamw_torch dataloader_num_workers dataloader_pin_memory tf32
        src/train.py hardware=a10 hardware=a100 hardware=v100
    """,
}
"""What the five documents name: knobs, overrides, presets, commands, functions."""


def code(page: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))


def overrides(page: str) -> list[str]:
    """Words of the form key=value, also those inside a command."""
    words = [word for span in code(page) for word in span.split()]
    return sorted(
        {word for word in words if re.fullmatch(r"[A-Za-z_][\w.]*=[^\s:()\"]+", word)}
        - {word for word in words if word.startswith(("--", "PYTORCH_"))}
    )


def composes(word: str) -> bool:
    for task in SCHEMAS:
        try:
            compose(task, [word])
        except BadInput:
            continue
        return True
    return False


@pytest.mark.parametrize("page", [SOURCES, TUNING], ids=["sources", "tuning"])
def test_every_override_composes(page: str):
    found = overrides(page)
    assert len(found) > 30
    assert [word for word in found if not composes(word)] == []


@pytest.mark.parametrize("page", [SOURCES, TUNING], ids=["sources", "tuning"])
def test_every_command_is_one(page: str):
    named = {m[1] for span in code(page) for m in re.finditer(r"\btrainfit ([a-z]+)", span)}
    assert named >= {"plan", "verify", "doctor", "watch"}
    assert named <= set(COMMANDS)


def test_every_preset_and_experiment_is_on_the_page():
    for group in ("hardware", "experiment"):
        for task in SCHEMAS:
            for name in options(task, group):
                assert f"`{group}={name}`" in SOURCES, (group, name)


def test_every_make_target_is_one():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {m[1] for span in code(SOURCES) for m in re.finditer(r"\bmake ([a-z0-9-]+)", span)}
    assert len(named) == 7
    assert named <= targets


def test_every_finding_that_is_named_exists():
    from trainfit.doctor import host_checks, run_checks
    from trainfit.doctor.patterns import PATTERNS

    known = {fault.fault.id for fault in (*host_checks.CHECKS, *PATTERNS, *run_checks.CHECKS)}
    assert known & set(code(SOURCES)) >= {"cuda_oom", "no_gpu", "run_waits"}
    plain = {span for span in code(SOURCES) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span)}
    assert plain - known - _not_findings() == set()


def _not_findings() -> set[str]:
    import trainfit.data
    import trainfit.hardware_optimizer as api
    from trainfit.conf.aliases import ALIASES
    from trainfit.conf.composition import keys

    endings = {key.split(".")[-1] for task in SCHEMAS for key in keys(task)}
    return {*dir(api), *dir(trainfit.data), *ALIASES, *endings, "wait_share", "slm_config"}


def test_every_item_of_the_receipt_is_on_the_page():
    from trainfit.measuring.receipt import VERDICTS

    assert set(VERDICTS) <= set(re.findall(r"[a-z0-9_]+", SOURCES))


def test_links_lead_to_pages_and_their_headings():
    for page in (SOURCES, TUNING):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page):
            text = (ROOT / "docs" / target).read_text() if target else page
            titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles}
            assert anchor in slugs, (target, anchor)


@pytest.mark.parametrize("document", NAMES)
def test_what_a_document_names_is_on_the_page(document: str):
    missing = [name for name in NAMES[document].split() if name not in SOURCES]
    assert missing == []


def row(first: str) -> str:
    """The one row of the page that begins so."""
    [found] = [line for line in SOURCES.splitlines() if line.startswith(f"| {first}")]
    return found


def test_what_no_document_says_is_credited_to_none():
    text = " ".join(SOURCES.split())
    for words in (
        "The guide names neither its model nor its task: text classification with "
        "`model.name=phobert-base-v2`, a Vietnamese encoder, is no document's.",
        "no sizes of a model: `model.name=gpt-small` and the rest of `trainfit config gpt` are no",
        "`experiment=gpt_medium` is a larger GPT of 24 layers",
    ):
        assert words in text
    assert "no document's" in row("effective batches 32 to 512")
    assert "no document's" in row("Gemma encoder with DoRA adapters")


def test_where_the_defaults_differ_the_page_says_so():
    from trainfit.planning import workers

    nli = compose("nli").values()
    assert (nli["cv.folds"], nli["training.batch_size"]) == (None, "auto")
    assert compose("nli", ["experiment=rtx3090_optimized"]).values()["training.batch_size"] == 8
    assert (workers(64, 80.0), workers(64, 12.0), workers(4, 80.0)) == (8, 4, 2)
    assert "**Different**: without it there is one split by default" in row("`train_nli_5fold.py`")
    assert "**Different**: the default is `training.batch_size=auto`" in row("larger batch, 4 to 8")
    assert "**Different**: capped at 8 and at one per 3 GB" in row("`num_workers: auto`")
    assert "**Different**" in row("workers of each preset")


# ── figures of the tuning guide ───────────────────────────────────────────────────────────────


def recorded(name: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["results"]
    return results


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    table = TUNING[TUNING.index(f"| {first} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]


def numbers(cells: list[str]) -> list[float]:
    return [float(re.sub(r"[^\d.]", "", cell)) for cell in cells]


def test_compiling_is_as_recorded():
    jobs = {job["name"]: job for job in recorded("2026-11-15-jobs-h200.json")}
    table = rows("step | eager")
    assert len(table) == 8
    for name, *cells in table:
        eager, compiled = jobs[name], jobs[f"{name} compiled"]
        times = [job["median_step_seconds"] * 1000 for job in (eager, compiled)]
        sizes = [job["peak_allocated"] / GIB for job in (eager, compiled)]
        told = numbers(cells)
        assert told[:2] == pytest.approx(times, abs=0.06), name
        assert told[2] == pytest.approx(times[0] / times[1], abs=0.006), name
        assert told[3:5] == pytest.approx(sizes, abs=0.06), name
        assert told[5] == pytest.approx(compiled["first_two_seconds"], abs=0.6), name
        assert sizes[1] < sizes[0]


def steps_of(model: str, shape: str, **wanted: Any) -> dict[str, Any]:
    """A recorded eager step of a bf16 classifier or language model, by its shape."""
    batch, length = map(int, shape.split("x"))
    usual = {"precision": "bf16", "method": "full", "checkpointing": False}
    case = {"compile": False, "padded": False} | usual | wanted
    case |= {"model": model, "batch": batch, "length": length}
    [found] = [
        step
        for step in recorded("2026-11-15-estimator-h200.json")
        if {key: step["case"][key] for key in case} == case
    ]
    return found


def test_checkpointing_is_as_recorded():
    table = rows("step | kept")
    assert len(table) == 6
    for name, *cells in table:
        kept = steps_of(*name.split())
        again = steps_of(*name.split(), checkpointing=True)
        times = [step["median_step_seconds"] * 1000 for step in (kept, again)]
        sizes = [step["peak_allocated"] / GIB for step in (kept, again)]
        told = numbers(cells)
        assert told[:2] == pytest.approx(times, abs=0.6), name
        assert told[2] == pytest.approx(100 * (times[1] / times[0] - 1), abs=0.6), name
        assert told[3:5] == pytest.approx(sizes, abs=0.06), name
        assert told[5] == pytest.approx(100 * (1 - sizes[1] / sizes[0]), abs=0.6), name


def test_methods_are_as_recorded():
    jobs = {job["name"]: job for job in recorded("2026-11-15-jobs-h200.json")}
    for method, *cells in rows("method"):
        padded = steps_of("gemma-3-1b-it", "8x512", method=method)
        packed = jobs["gemma packed 8192" + ("" if method == "full" else f" {method}")]
        figures = [
            (step["median_step_seconds"] * 1000, step["peak_allocated"] / GIB)
            for step in (padded, packed)
        ]
        told = numbers(cells)
        assert told[::2] == pytest.approx([times for times, _ in figures], abs=0.6)
        assert told[1::2] == pytest.approx([sizes for _, sizes in figures], abs=0.06)


def test_figures_in_sentences_are_as_recorded():
    text = " ".join(TUNING.split())
    gpt = [steps_of("gpt2", "8x1024", precision=p) for p in ("bf16", "fp16", "fp32")]
    bf16, fp16, fp32 = (f"{step['median_step_seconds'] * 1000:.0f} ms" for step in gpt)
    assert f"took {bf16} in bf16, {fp16} in fp16 and {fp32} in exact fp32" in text
    sizes = [step["peak_allocated"] / GIB for step in gpt]
    assert f"from {sizes[2]:.1f} to {sizes[0]:.1f} GiB" in text
    capped = {run["name"]: run for run in recorded("2026-11-15-capped-h200.json")}
    for name in ("bert full 11 GiB", "bert full 24 GiB", "bert full 40 GiB"):
        run = capped[name]
        width, count = (run["case"]["arguments"][key] for key in ("width", "micro_batches"))
        rate = width * count / run["median_step_seconds"]
        assert re.search(rf"{rate / 1000:.0f},000[a-z ]* with {width:,}", text), name
    for model, small, large in (
        ("gemma-3-1b-it", "8x512", "24x512"),
        ("gpt2", "8x1024", "32x1024"),
    ):
        few, many = steps_of(model, small), steps_of(model, large)
        told = [s["case"]["batch"] / s["median_step_seconds"] for s in (few, many)]
        assert f"from {told[0]:.0f} to {told[1]:.0f}" in text, model
