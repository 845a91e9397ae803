"""The command, its page, and the playbooks of the documents."""

import importlib
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_logs import HARMLESS, ILL, ill

from trainfit.cli.main import COMMANDS, run
from trainfit.conf import SCHEMAS, compose
from trainfit.core.errors import BadInput
from trainfit.doctor import machine_checks, run_checks
from trainfit.doctor.signs import patterns

PATTERNS = patterns()
troubleshooting = importlib.import_module("troubleshooting").troubleshooting

ROOT = Path(__file__).parent.parent.parent
FAULTS = {
    fault.id: fault
    for fault in (
        *(check.fault for check in machine_checks.CHECKS),
        *(pattern.fault for pattern in PATTERNS),
        *(check.fault for check in run_checks.CHECKS),
    )
}


def test_this_machine_within_five_seconds_of_work():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "trainfit", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    data = json.loads(done.stdout)
    wrong = [finding for finding in data["findings"] if finding["severity"] != "info"]
    assert done.returncode == (1 if wrong else 0)
    assert data["healthy"] == (not wrong)
    # Of the processor: other tests may run beside this one.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 5


@pytest.mark.parametrize("name", ["torch 2.4, much reserved but unallocated", "no headers"])
def test_an_ill_log_ends_with_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "train.log"
    log.write_text(ill(ILL[name][1]))
    assert run(["doctor", "--log", str(log), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in data["findings"]} == ILL[name][0]
    assert run(["doctor", "--log", str(log)]) == 1
    page = capsys.readouterr().out
    assert "fix" in page
    assert "zyxquabberword" not in page


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA out of memory",
        "CUDA out of memory",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
    ],
)
def test_out_of_memory_as_the_guides_write_it(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "train.log"
    log.write_text(line)
    assert run(["doctor", "--log", str(log)]) == 1
    page = capsys.readouterr().out
    assert "training.batch_size" in page
    assert "Something is wrong." in page


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_log_ends_with_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "train.log"
    log.write_text(HARMLESS[name])
    assert run(["doctor", "--log", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("version")
    assert found == {"healthy": True, "findings": []}


@pytest.mark.parametrize(
    "words", [["--log", "/none/here.log"], ["--log", "/"], ["--run", "none"], ["--what"]]
)
def test_bad_input_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_log_without_a_known_fault_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.log").write_text("step 4\nKeyboardInterrupt\n")
    assert run(["doctor", "--log", str(tmp_path / "a.log")]) == 0
    assert capsys.readouterr().out.strip() == "Nothing known is wrong in this log."


def test_a_log_and_a_run_are_one_too_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.log").write_text("")
    assert run(["doctor", "--log", str(tmp_path / "a.log"), "--run", "x"]) == 2


def test_a_log_needs_no_torch(tmp_path: Path):
    (tmp_path / "a.log").write_text("fine\n")
    code = (
        "import sys\nfrom trainfit.cli.main import run\n"
        f"code = run(['doctor', '--log', {str(tmp_path / 'a.log')!r}])\n"
        "sys.exit(f'torch' if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── the page ──────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_the_checks():
    page = ROOT / "docs" / "troubleshooting.md"
    assert page.read_text() == troubleshooting(), "run python benchmarks/docs_tables.py"


def test_the_page_names_every_fault_once():
    page = troubleshooting()
    for id, fault in FAULTS.items():
        assert page.count(f"`{id}`, {fault.severity}.") == 1
        assert fault.why in page
    assert len(FAULTS) == len(machine_checks.CHECKS) + len(PATTERNS) + len(run_checks.CHECKS)


# ── what the steps say can be done ────────────────────────────────────────────────────────────

STEPS = [(fault.id, step) for fault in FAULTS.values() for step in fault.fix]
WORD = re.compile(r"(?<![\w-])((?:[a-z_]+\.)?[a-z_]+)=([\w./-]+)")
_SECTIONS = ("device.", "model.", "data.", "training.", "optimization.", "cv.")


def test_every_override_in_a_step_is_understood():
    seen = 0
    for id, step in STEPS:
        for key, value in WORD.findall(step):
            if not key.startswith(_SECTIONS) and key not in ("hardware", "experiment"):
                continue
            seen += 1
            fitting = []
            for task in SCHEMAS:
                try:
                    fitting.append(compose(task, [f"{key}={value.rstrip('.')}"]))
                except BadInput:
                    continue
            assert fitting, f"{id}: {key}={value}"
            assert not fitting[0].notes, f"{id}: {key} is another key's alias"
    assert seen > 60


def test_every_key_that_a_step_names_exists():
    known = {key for task in SCHEMAS for key in compose(task).values()}
    for id, step in STEPS:
        for key in re.findall(r"\b(?:training|device|optimization|model|data)\.[a-z_]+\b", step):
            assert key in known or key.startswith(("model.gradient_checkpointing_",)), (id, key)


def test_every_command_in_a_step_exists():
    named = {word for _, step in STEPS for word in re.findall(r"`trainfit (\w+)", step)}
    assert named
    assert named <= set(COMMANDS)


PLAYBOOKS = [
    # document, playbook, fault, what its steps must say
    ("tuning guide", "OOM", "cuda_oom", ["training.batch_size", "data.max_length"]),
    ("tuning guide", "OOM", "cuda_oom", ["optimization.compile=false", "training.eval_iters=50"]),
    ("tuning guide", "OOM", "cuda_oom", ["training.eval_steps", "expandable_segments:True"]),
    ("tuning guide", "reserved but unallocated", "cuda_oom_fragmented", ["expandable_segments"]),
    ("tuning guide", "low throughput", "low_mfu", ["training.batch_size", "device.tf32=true"]),
    ("tuning guide", "low throughput", "low_mfu", ["device.mixed_precision=auto"]),
    ("tuning guide", "low throughput", "low_mfu", ["optimization.compile=true", "eval_steps"]),
    ("tuning guide", "low throughput", "low_mfu", ["training.num_workers", "pin_memory=true"]),
    ("tuning guide", "MFU targets", "run_low_mfu", ["training.batch_size", "data.max_length"]),
    ("tuning guide", "eval spikes", "run_evaluation_memory", ["training.eval_steps", "eval_iters"]),
    ("tuning guide", "eval spikes", "run_evaluation_time", ["training.eval_steps", "step 0"]),
    ("tuning guide", "NaNs", "nan_loss", ["training.learning_rate", "optimization.compile=false"]),
    ("tuning guide", "no GPUs found", "no_gpu_found", ["install the driver"]),
    ("tuning guide", "driver insufficient", "driver_too_old", ["Update the driver"]),
    ("tuning guide", "multi-GPU", "nccl_missing", ["CUDA build"]),
    ("tuning guide", "low utilisation", "gpu_underused", ["training.batch_size", "num_workers"]),
    ("tuning guide", "VRAM under 80%", "gpu_memory_unused", ["training.batch_size"]),
    ("hardware guide", "OOM", "cuda_oom", ["model.use_gradient_checkpointing=true"]),
    ("hardware guide", "OOM", "cuda_oom", ["gradient_accumulation_steps", "gpu_low_mem"]),
    ("hardware guide", "OOM", "cuda_oom", ["enable_memory_efficient_mode", "freeze_encoder=true"]),
    ("hardware guide", "slow training", "low_mfu", ["mixed_precision", "cudnn_benchmark", "SSD"]),
    ("hardware guide", "slow training", "disk_slow", ["SSD"]),
    ("hardware guide", "slow training", "run_full_precision", ["mixed_precision", "tf32=true"]),
    ("hardware guide", "compilation", "compile_failed", ["compile=false", "reduce-overhead"]),
    ("hardware guide", "compilation", "compile_failed", ["pip install --upgrade torch"]),
    ("hardware guide", "driver, CUDA", "cuda_error", ["nvidia-smi", "torch.version.cuda"]),
    ("hardware guide", "TF32 not working", "tf32_forbidden", ["device.tf32"]),
    ("hardware guide", "too many workers", "too_many_workers", ["training.num_workers=auto"]),
    ("hardware guide", "CPU training", "no_gpu", ["hardware=cpu"]),
    ("3090 page", "OOM", "cuda_oom", ["training.batch_size"]),
    ("3090 page", "worker errors", "loader_worker_crashed", ["num_workers=2", "num_workers=0"]),
    ("3090 page", "flash attention", "attention_kernel", ["model.use_flash_attention=false"]),
    ("3090 page", "TF32 warnings", "tf32_off", ["device.tf32=true", "8.0"]),
    ("T4 guide", "OOM", "cuda_oom", ["training.batch_size=8", "gradient_accumulation_steps=4"]),
    ("T4 guide", "OOM", "cuda_oom", ["192 → 128", "use_gradient_checkpointing=true"]),
    ("T4 guide", "slow", "run_underused", ["training.batch_size", "training.num_workers"]),
    ("T4 guide", "close other notebooks", "memory_held", ["notebooks"]),
    ("T4 guide", "optimizer not found", "fused_optimizer", ["optimization.optimizer=adamw"]),
    ("T4 guide", "bf16 unsupported", "emulated_bf16", ["device.mixed_precision=auto"]),
    ("status report", "OOM-resilient", "run_out_of_memory", ["training.batch_size"]),
    ("status report", "gradient clipping", "nan_loss", ["training.max_grad_norm=1.0"]),
    ("status report", "persistent workers", "run_waits", ["persistent_workers=true"]),
]


@pytest.mark.parametrize(("document", "playbook", "id", "words"), PLAYBOOKS)
def test_every_playbook_of_the_documents_is_here(
    document: str, playbook: str, id: str, words: list[str]
):
    steps = "\n".join(FAULTS[id].fix)
    for word in words:
        assert word in steps, f"{document}, {playbook}"
