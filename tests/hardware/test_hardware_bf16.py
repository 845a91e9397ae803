import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainfit.hardware import as_if, detect, detection
from trainfit.hardware.catalogue import find
from trainfit.hardware.detection import _tried, bf16_fault


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_child_that_dies_names_its_signal_and_this_process_lives():
    assert bf16_fault(child("import os; os.kill(os.getpid(), 4)")) == "SIGILL"


@pytest.mark.parametrize("code", ["pass", "import sys; sys.exit(3)"])
def test_a_child_that_ends_by_itself_is_no_fault(code: str):
    assert bf16_fault(child(code)) is None


def test_a_child_that_gives_no_answer_is_not_trusted():
    assert bf16_fault(child("import time; time.sleep(60)"), seconds=0.2) == "a timeout"


def test_a_program_that_cannot_start_is_no_fault():
    assert bf16_fault(("/no/such/program",)) is None


def test_a_good_trial_is_kept_for_the_machine_and_a_fault_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    tried: list[str | None] = []
    answers: list[str | None] = ["SIGILL", None]
    monkeypatch.setattr(
        detection, "bf16_fault", lambda: tried.append(answers[len(tried)]) or tried[-1]
    )
    chosen = (("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "AVX2"))
    for name, _ in chosen:
        monkeypatch.delenv(name, raising=False)
    before = detection.tried_before()
    assert before is not None
    assert [detection._fault_here(before) for _ in range(4)] == ["SIGILL", None, None, None]
    assert len(tried) == 2
    for name, value in chosen:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert detection.tried_before() != before
    monkeypatch.setattr(detection, "_BOOT", tmp_path / "nowhere")
    assert detection.tried_before() is None


@pytest.mark.parametrize(("dies", "tried"), [(False, []), (True, ["here"])])
def test_a_child_that_tries_it_before_its_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool, tried: list[str]
):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    found: list[str] = []
    monkeypatch.setattr(detection, "bf16_fault", lambda: found.append("here"))
    before = detection.tried_before()
    assert before is not None
    before.parent.mkdir(parents=True)
    does = "os.kill(os.getpid(), 4)" if dies else f"open({str(before)!r}, 'w'); time.sleep(60)"
    with subprocess.Popen(child(f"import os, time; time.sleep(0.2); {does}"), text=True) as process:
        monkeypatch.setattr(detection, "AHEAD", [process])
        assert detection._fault_here(before) is None
        assert found == tried
        process.kill()


def test_a_processor_that_only_claims_bf16_is_believed_no_longer():
    profile = as_if(find("t4"))
    claims = replace(profile, cpu=replace(profile.cpu, native_bf16=True))
    tried = _tried(claims, lambda: "SIGILL")
    assert not tried.cpu.native_bf16
    assert [note.code for note in tried.notes][-1] == "cpu_bf16_dies"
    assert _tried(claims, lambda: None) == claims
    without = replace(profile, cpu=replace(profile.cpu, native_bf16=False))
    assert _tried(without, lambda: "SIGILL") == without


@pytest.mark.skipif(torch.cuda.is_available(), reason="tried only where the CPU has to train")
def test_what_detect_says_of_this_cpu_holds():
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    done = subprocess.run(child(product), capture_output=True, timeout=100, check=False)
    died = done.returncode == -signal.SIGILL
    profile = detect()
    assert not (died and profile.cpu.native_bf16)
    assert died == ("cpu_bf16_dies" in [note.code for note in profile.notes])
