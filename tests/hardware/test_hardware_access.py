from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest
from hardware_fakes import (
    A30,
    H200,
    HOST,
    RTX3090,
    RTX4090,
    FakeNvml,
    answering,
    codes,
    cpu_torch,
    fake_torch,
    note,
    numbered,
    profile,
)

# ── no GPU for torch ──────────────────────────────────────────────────────────────────────────


def test_no_gpu_at_all() -> None:
    made = profile(cpu_torch())
    assert made.gpus == ()
    assert made.other_gpus == ()
    assert codes(made) == ["no_gpu"]


def test_a_driver_but_a_cpu_torch() -> None:
    made = profile(cpu_torch(), FakeNvml(*numbered(H200, 1, 2)))
    assert codes(made) == ["cpu_torch"]
    assert made.other_gpus == ("NVIDIA H200", "NVIDIA H200")
    found = note(made, "cpu_torch")
    assert "2.13.0+cpu" in found.text
    assert "NVIDIA H200" in found.text
    assert "pip install torch==2.13.0+cu130" in found.fix
    assert made.driver == "580.159.04"


def test_a_cpu_torch_with_an_old_driver_gets_the_wheel_that_runs_on_it() -> None:
    nvml = FakeNvml(RTX3090, driver="535.183.01", cuda=12020)
    assert "whl/cu126" in note(profile(cpu_torch(), nvml), "cpu_torch").fix


def test_cuda_torch_without_a_driver() -> None:
    warning = "CUDA initialization: Found no NVIDIA driver on your system."
    made = profile(fake_torch(warning=warning))
    assert codes(made) == ["no_driver"]
    found = note(made, "no_driver")
    assert "Library Not Found" in found.text
    assert "Found no NVIDIA driver" in found.text


@pytest.mark.parametrize("torch", [fake_torch(), cpu_torch()])
def test_a_gpu_on_the_bus_that_no_driver_runs(torch: object) -> None:
    made = profile(torch, host=replace(HOST, nvidia_devices=2))
    assert codes(made) == ["no_driver"]
    assert "2 NVIDIA GPU(s) are on the PCI bus" in note(made, "no_driver").text


def test_a_driver_too_old_for_this_torch() -> None:
    nvml = FakeNvml(A30, driver="550.54.15", cuda=12040)
    made = profile(fake_torch(warning="CUDA initialization: driver is too old"), nvml)
    assert codes(made) == ["cuda_error"]
    assert made.other_gpus == ("NVIDIA A30",)
    assert "550.54.15" in note(made, "cuda_error").text
    assert "+cu126" in note(made, "cuda_error").fix


def test_an_error_of_cuda_is_told_by_its_first_line() -> None:
    torch = fake_torch(error=RuntimeError("CUDA unknown error - this may be due to\nmore"))
    found = note(profile(torch, FakeNvml(H200)), "cuda_error")
    assert "CUDA unknown error - this may be due to." in found.text
    assert "more" not in found.text


def test_torch_that_cannot_be_imported() -> None:
    made = profile(ImportError("libcudnn.so.9: cannot open shared object file"), FakeNvml(H200))
    assert made.torch is None
    assert made.other_gpus == ("NVIDIA H200",)
    assert "libcudnn.so.9" in note(made, "no_torch").text


def test_rocm_without_a_gpu() -> None:
    made = profile(fake_torch(version="2.13.0+rocm7.0", cuda=None, hip="7.0.5"))
    assert codes(made) == ["no_driver"]
    assert "AMD" in note(made, "no_driver").text


# ── NVML and what it is joined by ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
        ImportError("No module named 'pynvml'"),
        ImportError("its shared library is not here"),
    ],
)
def test_a_gpu_with_a_broken_nvml(nvml: FakeNvml | ImportError) -> None:
    made = profile(fake_torch(H200), nvml)
    assert codes(made) == ["nvml_broken"]
    assert made.gpus[0].slug == "h200-sxm-141gb"
    assert made.gpus[0].uuid == f"GPU-{H200.bare_uuid}"
    assert made.gpus[0].state.memory_used_gib is None
    assert made.driver is None
    missing = isinstance(nvml, ImportError)
    assert ("pip install nvidia-ml-py" in note(made, "nvml_broken").fix) is missing


def test_a_gpu_that_nvml_lost_leaves_the_state_of_the_others() -> None:
    lost, well = numbered(A30, 1, 2)
    well = answering(well, PowerUsage=30_000)
    made = profile(fake_torch(well), FakeNvml(answering(lost, Lost=True), well))
    assert codes(made) == ["nvml_broken"]
    assert "GPU 0: GPU is lost" in note(made, "nvml_broken").text
    assert made.gpus[0].state.power_w == 30.0


@pytest.mark.parametrize("identity", [(True, True), (True, False), (False, True)])
def test_cuda_and_nvml_number_gpus_differently(identity: tuple[bool, bool]) -> None:
    slow = answering(replace(RTX3090, number=1), PowerUsage=100_000)
    fast = answering(replace(RTX4090, number=2), PowerUsage=200_000)
    made = profile(fake_torch(fast, slow, identity=identity), FakeNvml(slow, fast))
    assert [(gpu.name[-4:], gpu.state.power_w) for gpu in made.gpus] == [
        ("4090", 200.0),
        ("3090", 100.0),
    ]
    assert made.other_gpus == ()


def test_position_counts_only_when_the_lists_are_alike() -> None:
    cards = [answering(card, PowerUsage=1000 * card.number) for card in numbered(A30, 1, 2)]
    unnamed = (False, False)
    alike = profile(fake_torch(*cards, identity=unnamed), FakeNvml(*cards))
    assert [gpu.state.power_w for gpu in alike.gpus] == [1.0, 2.0]
    hidden = profile(fake_torch(cards[1], identity=unnamed), FakeNvml(*cards), visible="1")
    assert hidden.gpus[0].state.power_w is None
    assert hidden.other_gpus == ("NVIDIA A30",)


# ── CUDA_VISIBLE_DEVICES ──────────────────────────────────────────────────────────────────────

TWO = numbered(A30, 1, 2)


def test_some_gpus_are_hidden() -> None:
    made = profile(fake_torch(TWO[1]), FakeNvml(*TWO), visible="1")
    assert codes(made) == ["hidden_gpus"]
    assert made.other_gpus == ("NVIDIA A30",)
    assert made.gpus[0].uuid == f"GPU-{TWO[1].bare_uuid}"
    assert "CUDA_VISIBLE_DEVICES='1' hides 1 of 2 GPUs" in note(made, "hidden_gpus").text
    assert "unset CUDA_VISIBLE_DEVICES" in note(made, "hidden_gpus").fix


@pytest.mark.parametrize("value", ["", "-1"])
def test_all_gpus_are_hidden(value: str) -> None:
    made = profile(fake_torch(), FakeNvml(*TWO), visible=value)
    assert codes(made) == ["hidden_gpus"]
    assert "hides every GPU (NVIDIA A30, NVIDIA A30)" in note(made, "hidden_gpus").text
    assert len(made.other_gpus) == 2


def test_all_gpus_are_hidden_and_nvml_cannot_count_them() -> None:
    made = profile(fake_torch(), ImportError("No module named 'pynvml'"), visible="-1")
    assert codes(made) == ["hidden_gpus"]
    assert "hides every GPU." in note(made, "hidden_gpus").text


def test_malformed_and_hiding_all() -> None:
    made = profile(fake_torch(), FakeNvml(*TWO), visible="gpu0")
    assert codes(made) == ["hidden_gpus", "visible_devices_malformed"]
    assert "'gpu0' is neither" in note(made, "visible_devices_malformed").text


def test_malformed_after_a_good_entry() -> None:
    made = profile(fake_torch(*TWO), FakeNvml(*TWO), visible="0,1,7")
    assert codes(made) == ["visible_devices_malformed"]
    assert len(made.gpus) == 2


def test_gpus_that_torch_lacks_for_no_reason_of_the_variable() -> None:
    made = profile(fake_torch(TWO[0]), FakeNvml(*TWO))
    assert codes(made) == ["unused_gpus"]
    assert made.other_gpus == ("NVIDIA A30",)
