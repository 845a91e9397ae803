from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
from hardware_fakes import (
    A30,
    A100_MIG,
    GIB,
    H200,
    PID,
    RTX3090,
    FakeNvml,
    answering,
    give,
    numbered,
    process,
    used,
)

from trainfit.core.records import GpuState, PcieLink
from trainfit.hardware.nvml import NvmlReport, probe_nvml

BUSY_H200 = used(
    H200,
    11_264,
    EnforcedPowerLimit=700_000,
    PowerManagementLimitConstraints=[200_000, 700_000],
    PowerUsage=342_500,
    TemperatureV=61,
    ClockInfo=lambda kind: {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 3201}[kind],
    MaxClockInfo=lambda kind: 1980,
    CurrentClocksEventReasons=0x1 | 0x4 | 0x40,
    UtilizationRates=SimpleNamespace(gpu=97, memory=40),
    EccMode=[1, 1],
    CurrPcieLinkGeneration=1,
    CurrPcieLinkWidth=8,
    MaxPcieLinkGeneration=5,
    MaxPcieLinkWidth=16,
    ComputeRunningProcesses=[process(99, 4096), process(PID, 7168)],
)


def report(nvml: FakeNvml) -> NvmlReport:
    return probe_nvml(lambda: nvml, PID)


def test_everything_a_driver_can_tell() -> None:
    nvml = FakeNvml(BUSY_H200)
    found = report(nvml)
    assert (found.driver, found.driver_cuda, found.error) == ("580.159.04", "13.0", None)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.uuid) == ("NVIDIA H200", f"GPU-{H200.bare_uuid}")
    assert (gpu.pci, gpu.capability, gpu.mig_on) == ("0000:01:00", (9, 0), False)
    assert gpu.memory_gib == 143771 / 1024
    assert gpu.own_gib == 7.0
    assert gpu.state == GpuState(
        memory_used_gib=11.0,
        power_limit_w=700.0,
        power_max_w=700.0,
        power_w=342.5,
        temperature_c=61,
        clock_sm_mhz=1755,
        clock_sm_max_mhz=1980,
        clock_memory_mhz=3201,
        throttle_reasons=("sw_power_cap", "hw_thermal_slowdown"),
        utilisation_percent=97,
        ecc=True,
        pcie=PcieLink(generation=1, width=8, max_generation=5, max_width=16),
    )
    assert nvml.open == 0  # every start is followed by an end


def test_every_question_is_one_that_the_binding_knows() -> None:
    nvml = FakeNvml(BUSY_H200, A100_MIG)
    report(nvml)
    assert nvml.unknown == set()
    assert len(nvml.asked) > 20


def test_what_is_not_supported_is_unknown() -> None:
    (gpu,) = report(FakeNvml(RTX3090)).gpus
    assert gpu.own_gib is None
    assert gpu.state == GpuState(memory_used_gib=4 / 1024)


def test_idle_is_no_throttling_and_zero_is_a_value() -> None:
    card = answering(
        H200, CurrentClocksEventReasons=0x1, EccMode=[0, 1], TemperatureV=0, PowerUsage=0
    )
    (gpu,) = report(FakeNvml(card)).gpus
    assert gpu.state.throttle_reasons == ()
    assert gpu.state.ecc is False  # pending, not yet on
    assert (gpu.state.temperature_c, gpu.state.power_w) == (0, 0.0)
    assert gpu.state.utilisation_percent == 0


def test_older_drivers_are_asked_by_the_older_names() -> None:
    def only_the_first_version(*version: int) -> SimpleNamespace:
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=24 * GIB, used=GIB)

    card = answering(
        A30,
        MemoryInfo=only_the_first_version,
        Temperature=44,
        CurrentClocksThrottleReasons=0x8,
        PowerManagementLimit=165_000,
    )
    (gpu,) = report(FakeNvml(card)).gpus
    assert (gpu.memory_gib, gpu.state.memory_used_gib) == (24.0, 1.0)
    assert (gpu.state.temperature_c, gpu.state.throttle_reasons) == (44, ("hw_slowdown",))
    assert gpu.state.power_limit_w == 165.0


def test_a_process_whose_memory_is_not_told_leaves_it_unknown() -> None:
    card = answering(A30, ComputeRunningProcesses=[process(PID, None)])
    assert report(FakeNvml(card)).gpus[0].own_gib is None


def test_a_desktop_process_is_found_among_the_graphics_ones() -> None:
    card = answering(RTX3090, GraphicsRunningProcesses=[process(PID, 512)])
    assert report(FakeNvml(card)).gpus[0].own_gib == 0.5


def test_mig_slices_are_listed_under_their_gpu() -> None:
    (gpu,) = report(FakeNvml(A100_MIG)).gpus
    (part,) = gpu.slices
    assert gpu.mig_on
    assert part.name.endswith("MIG 1g.5gb")
    assert part.uuid is not None
    assert part.uuid.startswith("MIG-")
    assert part.memory_gib == 4.75


def test_a_lost_gpu_leaves_the_others() -> None:
    first, second = numbered(A30, 1, 2)
    found = report(FakeNvml(answering(first, Lost=True), second))
    assert [gpu.uuid for gpu in found.gpus] == [f"GPU-{second.bare_uuid}"]
    assert found.error == "GPU 0: GPU is lost"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "Shared Library Not Found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
    ],
)
def test_a_library_that_does_not_start(error: int, words: str) -> None:
    found = report(FakeNvml(H200, error=error))
    assert found.gpus == ()
    assert found.driver is None
    assert words in (found.error or "")


def test_no_binding_at_all() -> None:
    missing = ImportError("No module named 'pynvml'")
    assert probe_nvml(lambda: give(missing), PID) == NvmlReport(error=str(missing), installed=False)


def test_a_driver_without_gpus() -> None:
    found = report(FakeNvml())
    assert (found.gpus, found.error, found.driver) == ((), None, "580.159.04")
