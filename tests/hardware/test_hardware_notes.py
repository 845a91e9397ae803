from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hardware_fakes import (
    A30,
    A100_MIG,
    H200,
    HOST,
    MI250X,
    PID,
    RTX3090,
    RTX4090,
    SLICE,
    T4,
    Card,
    FakeNvml,
    answering,
    codes,
    cpu_torch,
    fake_torch,
    note,
    numbered,
    process,
    profile,
    used,
)

from trainfit.hardware import access

# ── kinds of GPU ──────────────────────────────────────────────────────────────────────────────


def test_mixed_gpus() -> None:
    cards = (replace(RTX4090, number=1), replace(RTX3090, number=2))
    made = profile(fake_torch(*cards), FakeNvml(*cards))
    assert codes(made) == ["mixed_gpus"]
    assert [gpu.slug for gpu in made.gpus] == ["rtx-4090", "rtx-3090"]
    # The 3090 has more memory by a hair; the 4090 is the one to keep.
    assert f"CUDA_VISIBLE_DEVICES=GPU-{cards[0].bare_uuid}`" in note(made, "mixed_gpus").fix


def with_parents_identity(card: Card) -> Card:
    """Some drivers give a slice its parent's UUID."""
    return replace(card, number=A100_MIG.number)


@pytest.mark.parametrize("seen", [SLICE, with_parents_identity(SLICE)])
def test_a_mig_slice(seen: Card) -> None:
    parent = answering(A100_MIG, PowerUsage=90_000)
    parent = replace(parent, slices=(used(SLICE, 128),))
    made = profile(fake_torch(seen), FakeNvml(parent), visible="0")
    (gpu,) = made.gpus
    assert codes(made) == ["mig"]
    assert (gpu.mig, gpu.slug) == ("1g.5gb", None)
    assert gpu.uuid == f"MIG-{SLICE.bare_uuid}"
    assert gpu.native_bf16
    assert gpu.state.power_w == 90.0
    assert gpu.state.memory_used_gib == 0.125  # the slice's, not the whole GPU's
    assert made.other_gpus == ()


def test_mig_mode_without_a_slice() -> None:
    made = profile(fake_torch(), FakeNvml(replace(A100_MIG, slices=())))
    assert codes(made) == ["mig"]
    assert "no slice" in note(made, "mig").text


def test_an_unknown_gpu_is_a_note_and_no_neighbour() -> None:
    card = replace(RTX4090, name="NVIDIA GeForce RTX 4090 Extreme")
    made = profile(fake_torch(card), FakeNvml(card))  # a leaked warning would be an error here
    assert made.gpus[0].slug is None
    assert made.gpus[0].native_bf16
    assert codes(made) == ["unknown_gpu"]
    assert "RTX 4090 Extreme" in note(made, "unknown_gpu").text


def test_an_unknown_amd_gpu_claims_nothing() -> None:
    card = replace(MI250X, name="AMD Instinct MI999", gcn="gfx1300")
    torch = fake_torch(card, version="2.13.0+rocm7.0", cuda=None, hip="7.0.5")
    (gpu,) = profile(torch).gpus
    assert (gpu.native_bf16, gpu.tf32, gpu.fp16, gpu.fp8) == (False,) * 4


@pytest.mark.parametrize(("count", "fix"), [(1, "fp16"), (4, "fp16")])
def test_bf16_on_a_t4_is_emulated(count: int, fix: str) -> None:
    cards = numbered(T4, *range(1, count + 1))
    made = profile(fake_torch(*cards), FakeNvml(*cards))
    assert not made.gpus[0].native_bf16
    assert not made.gpus[0].tf32
    assert made.gpus[0].fp16
    assert made.gpus[0].slug == "t4"
    assert codes(made) == ["emulated_bf16"]  # once, however many there are
    assert "emulated and slow" in note(made, "emulated_bf16").text
    assert fix in note(made, "emulated_bf16").fix


def test_a_gpu_without_half_precision_units_trains_in_fp32() -> None:
    card = Card("NVIDIA GeForce GTX 1080 Ti", 11264, 10.91, (6, 1), 28)
    made = profile(fake_torch(card, architectures=("sm_60", "sm_75")), FakeNvml(card))
    assert codes(made) == ["emulated_bf16"]
    assert "fp32" in note(made, "emulated_bf16").fix


def test_a_gpu_that_this_build_has_no_kernels_for() -> None:
    card = Card("Tesla V100-SXM2-16GB", 16384, 15.78, (7, 0), 80)
    made = profile(fake_torch(card), FakeNvml(card))
    found = note(made, "unsupported_architecture")
    assert "7.0" in found.text
    assert "sm_75" in found.text
    assert "whl/cu126" in found.fix


# ── the state of a GPU ────────────────────────────────────────────────────────────────────────


def test_a_narrow_link() -> None:
    card = answering(A30, CurrPcieLinkWidth=4, MaxPcieLinkWidth=16)
    assert "4 of 16" in note(profile(fake_torch(card), FakeNvml(card)), "pcie_narrow").text


def test_an_idle_link_saves_power_and_is_no_note() -> None:
    card = answering(
        A30,
        CurrPcieLinkGeneration=1,
        MaxPcieLinkGeneration=4,
        CurrPcieLinkWidth=16,
        MaxPcieLinkWidth=16,
    )
    made = profile(fake_torch(card), FakeNvml(card))
    assert made.notes == ()
    assert made.gpus[0].state.pcie.generation == 1


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        (0x08, "hw_slowdown"),
        (0x20, "sw_thermal_slowdown"),
        (0x40, "hw_thermal_slowdown"),
        (0x80, "hw_power_brake_slowdown"),
    ],
)
def test_throttling(bits: int, name: str) -> None:
    card = answering(H200, CurrentClocksEventReasons=bits, TemperatureV=91)
    text = note(profile(fake_torch(card), FakeNvml(card)), "throttled").text
    assert name in text
    assert "91 °C" in text


def test_a_power_cap_is_a_choice_and_no_note() -> None:
    card = answering(H200, CurrentClocksEventReasons=0x1 | 0x2 | 0x4)
    made = profile(fake_torch(card), FakeNvml(card))
    assert made.notes == ()
    assert "sw_power_cap" in made.gpus[0].state.throttle_reasons


def test_memory_that_others_use() -> None:
    card = used(RTX3090, 6144)
    made = profile(fake_torch(card), FakeNvml(card))
    assert made.gpus[0].state.memory_used_by_others_gib == 6.0
    assert "6.0 of 23.6 GiB" in note(made, "memory_in_use").text


def test_a_little_memory_in_use_is_no_note() -> None:
    card = used(RTX3090, 800)
    assert profile(fake_torch(card), FakeNvml(card)).notes == ()


def test_what_this_process_holds_is_not_others() -> None:
    card = used(RTX3090, 6144, ComputeRunningProcesses=[process(PID, 5120), process(7, 1024)])
    made = profile(fake_torch(card, has_context=True), FakeNvml(card))
    assert made.gpus[0].state.memory_used_gib == 6.0
    assert made.gpus[0].state.memory_used_by_others_gib == 1.0
    assert made.notes == ()


def test_in_a_container_what_is_ones_own_cannot_be_told_apart() -> None:
    # The driver lists the host's process numbers: one of them may be this process.
    card = used(RTX3090, 6144, ComputeRunningProcesses=[process(31337, 6000)])
    made = profile(fake_torch(card, has_context=True), FakeNvml(card))
    assert made.gpus[0].state.memory_used_by_others_gib is None
    assert made.notes == ()
    # Before it has used the GPU, all that is used there is somebody else's.
    made = profile(fake_torch(card, has_context=False), FakeNvml(card))
    assert made.gpus[0].state.memory_used_by_others_gib == 6.0


# ── the machine around it ─────────────────────────────────────────────────────────────────────


def test_small_shared_memory() -> None:
    made = profile(cpu_torch(), host=replace(HOST, shm_gib=0.0625))
    assert "0.06 GiB" in note(made, "small_shm").text
    assert "--shm-size" in note(made, "small_shm").fix
    assert "small_shm" not in codes(profile(cpu_torch(), host=replace(HOST, shm_gib=None)))


@pytest.mark.parametrize(("affinity", "why"), [(64, "cgroup"), (4, "affinity")])
def test_fewer_cores_than_the_host_has(affinity: int, why: str) -> None:
    limited = replace(HOST.cpu, cores=4, host_cores=64)
    made = profile(cpu_torch(), host=replace(HOST, cpu=limited, affinity=affinity))
    found = note(made, "cpu_limited")
    assert "64 cores" in found.text
    assert "may use 4" in found.text
    assert why in found.text


def test_every_row_of_the_notes_is_used_and_every_note_has_one():
    folder = Path(access.__file__).parent
    rows = set(yaml.safe_load((folder / "notes.yaml").read_text()))
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    made = set(re.findall(r'note\(\s*"(\w+)"(?: if [^"]*"(\w+)")?', code))
    assert rows == {name for names in made for name in names if name}
