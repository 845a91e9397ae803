from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hardware_fakes import (
    A30,
    GIB,
    H200,
    HOST,
    MI250X,
    RTX3090,
    FakeNvml,
    codes,
    fake_torch,
    note,
    numbered,
    profile,
)

from trainfit.core.records import HardwareProfile
from trainfit.hardware import as_if, detect, detection
from trainfit.hardware.catalogue import find
from trainfit.hardware.host import probe_host
from trainfit.hardware.nvml import NvmlGpu, NvmlReport

# ── machines that are as they should be ───────────────────────────────────────────────────────


def test_h200() -> None:
    made = profile(fake_torch(H200), FakeNvml(H200))
    (gpu,) = made.gpus
    assert (gpu.name, gpu.slug, gpu.vendor) == ("NVIDIA H200", "h200-sxm-141gb", "nvidia")
    assert gpu.memory_gib == pytest.approx(139.8)
    assert (gpu.compute_capability, gpu.sm_count) == ("9.0", 132)
    assert gpu.native_bf16
    assert gpu.tf32
    assert gpu.fp16
    assert gpu.fp8
    assert gpu.uuid == f"GPU-{H200.bare_uuid}"
    assert (made.driver, made.driver_cuda) == ("580.159.04", "13.0")
    assert made.torch is not None
    assert made.torch.backend == "cuda"
    assert made.notes == ()
    assert not made.simulated


def test_two_equal_gpus_need_no_note() -> None:
    cards = numbered(A30, 1, 2)
    made = profile(fake_torch(*cards), FakeNvml(*cards))
    assert [gpu.slug for gpu in made.gpus] == ["a30", "a30"]
    assert made.notes == ()


def test_a_3090_is_not_a_4090() -> None:
    made = profile(fake_torch(RTX3090), FakeNvml(RTX3090))
    assert made.gpus[0].slug == "rtx-3090"
    assert not made.gpus[0].fp8


def test_rocm() -> None:
    torch = fake_torch(MI250X, version="2.13.0+rocm7.0", cuda=None, hip="7.0.5")
    (gpu,) = profile(torch).gpus
    assert (gpu.vendor, gpu.slug, gpu.compute_capability) == ("amd", "mi250x-gcd", "gfx90a")
    assert gpu.native_bf16
    assert codes(profile(torch)) == []


def test_apple() -> None:
    torch = fake_torch(version="2.13.0", cuda=None, mps=96 * GIB)
    made = profile(torch, chip="Apple M3 Max")
    (gpu,) = made.gpus
    assert (gpu.vendor, gpu.slug, gpu.memory_gib) == ("apple", "apple-m3-max", 96.0)
    assert codes(made) == []


def test_apple_without_a_bound_shares_the_hosts_memory() -> None:
    torch = fake_torch(version="2.13.0", cuda=None, mps=1)
    del torch.mps.recommended_max_memory
    assert profile(torch, chip="Apple M3 Max").gpus[0].memory_gib == HOST.memory_gib


# ── the real thing ────────────────────────────────────────────────────────────────────────────


def test_this_machine(tmp_path: Path) -> None:
    made = detect(tmp_path)
    assert HardwareProfile.from_json(made.to_json()) == made
    assert made.cpu.cores >= 1
    assert made.disk_free_gib > 0
    assert made.torch is not None
    if not made.gpus:
        assert {"no_gpu", "cpu_torch", "no_driver", "cuda_error", "hidden_gpus"} & set(codes(made))


def python(code: str) -> str:
    """Run the code in a new interpreter, so that what it imports can be seen."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'psutil', 'pynvml'} & set(sys.modules)"
    assert python(f"import sys, trainfit.hardware; print({heavy})") == "set()"


def test_as_if_does_not_ask_torch() -> None:
    code = (
        "import sys; from trainfit.hardware import as_if;"
        "from trainfit.hardware.catalogue import find;"
        "as_if(find('t4')); print('torch' in sys.modules)"
    )
    assert python(code) == "False"


def test_as_if() -> None:
    made = as_if(find("t4"))
    (gpu,) = made.gpus
    assert (gpu.slug, gpu.compute_capability, gpu.native_bf16) == ("t4", "7.5", False)
    assert gpu.memory_gib == pytest.approx(14.7, abs=0.1)
    assert (made.torch, made.driver, made.simulated) == (None, None, True)
    assert "emulated_bf16" in codes(made)
    assert "no_gpu" not in codes(made)
    assert HardwareProfile.from_json(made.to_json()) == made


def test_the_cores_beside_a_gpu_are_assumed_unless_it_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = replace(probe_host(Path()), nvidia_devices=1)
    host = replace(host, cpu=replace(host.cpu, cores=3))
    monkeypatch.setattr(detection, "probe_host", lambda _folder: host)
    inside = NvmlReport(gpus=(NvmlGpu(name="Tesla T4", memory_gib=14.74),))
    monkeypatch.setattr(detection, "probe_nvml", lambda _load, _pid: inside)
    here, elsewhere = as_if(find("t4")), as_if(find("rtx-4090"))
    assert (here.cpu.cores, here.cpu.assumed) == (3, False)
    assert "assumed_cores" not in codes(here)
    assert (elsewhere.cpu.cores, elsewhere.cpu.assumed) == (8, True)
    assert "8 usable cores" in note(elsewhere, "assumed_cores").text


@pytest.mark.parametrize("slug", ["h200", "mi250x-gcd", "apple-m3-max"])
def test_as_if_for_every_vendor(slug: str) -> None:
    made = as_if(find(slug))
    assert made.gpus[0].native_bf16
    assert not {"emulated_bf16", "unknown_gpu"} & set(codes(made))


@pytest.mark.gpu
def test_a_real_gpu_agrees_with_nvidia_smi() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("needs an NVIDIA GPU")
    made = detect()
    fields = "uuid,name,memory.total,driver_version,compute_cap,pcie.link.width.max,power.max_limit"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    rows = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    known = {row.split(", ")[0]: row.split(", ")[1:] for row in rows}
    assert made.gpus
    for gpu in made.gpus:
        assert gpu.uuid is not None
        name, total, driver, capability, width, power = known[gpu.uuid]
        assert (gpu.name, made.driver, gpu.compute_capability) == (name, driver, capability)
        assert 0.93 < gpu.memory_gib / (float(total) / 1024) <= 1
        if width.isdecimal():
            assert gpu.state.pcie.max_width == int(width)
        if re.fullmatch(r"[\d.]+", power):
            assert gpu.state.power_max_w == pytest.approx(float(power), abs=0.01)


@pytest.mark.gpu
def test_detection_allocates_nothing_on_a_real_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    code = (
        "import torch; from trainfit.hardware import detect; made = detect();"
        "print(torch.cuda.memory_reserved(), torch._C._cuda_hasPrimaryContext(0),"
        "made.gpus[0].state.memory_used_by_others_gib is None)"
    )
    assert python(code) == "0 False False"
