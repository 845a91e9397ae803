"""Every name in docs/sources.md exists, and every name of the source documents is on that page."""

import re
from pathlib import Path

import pytest

from trainfit.cli.main import COMMANDS
from trainfit.conf import SCHEMAS, compose, options
from trainfit.core.errors import BadInput

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "docs" / "sources.md").read_text()
TUNING = (ROOT / "docs" / "tuning.md").read_text()

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
"""Names in the five documents: settings, overrides, presets, commands, functions."""


def code(page: str) -> list[str]:
    """Text in backticks, outside of blocks."""
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
    from trainfit.doctor import machine_checks, run_checks
    from trainfit.doctor.signs import patterns

    known = {fault.fault.id for fault in (*machine_checks.CHECKS, *patterns(), *run_checks.CHECKS)}
    assert known & set(code(SOURCES)) >= {"cuda_oom", "no_gpu", "run_waits"}
    plain = {span for span in code(SOURCES) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span)}
    assert plain - known - _not_findings() == set()


def _not_findings() -> set[str]:
    import trainfit.data
    import trainfit.hardware_optimizer as api
    from trainfit.conf.aliases import ALIASES
    from trainfit.conf.composition import keys

    endings = {key.split(".")[-1] for task in SCHEMAS for key in keys(task)}
    return {*dir(api), *trainfit.data.__all__, *ALIASES, *endings, "wait_share", "slm_config"}


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
