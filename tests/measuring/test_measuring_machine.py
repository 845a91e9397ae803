import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.core.records import HardwareProfile, Measurement, Measurements
from trainfit.hardware import detect
from trainfit.measuring import machine_rates, measure, remember, remembered


@pytest.fixture
def cpu() -> HardwareProfile:
    return replace(detect(), gpus=())


def test_rates_are_those_of_a_gpu_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    name = "NVIDIA GeForce RTX 3080"
    rates = {f"{name} Ti GPU-1-2": 70.0, f"{name} Laptop GPU GPU-3-4": 30.0}
    for device, value in rates.items():
        item = Measurement(name="matmul_bf16", unit="TFLOP/s", value=value, samples=(value,))
        remember(Measurements(device=device, torch="", driver=None, taken="", items=(item,)))
    assert machine_rates.remembered_rates(name) == {}
    assert machine_rates.remembered_rates("") == {}
    assert machine_rates.remembered_rates(f"{name} Ti") == {"matmul_bf16": 70.0}


@pytest.mark.soak
def test_the_cpu_is_measured_against_an_independent_clock(
    cpu: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine_rates, "ITEM_SECONDS", 0.2)
    names: list[str] = []
    measured = measure(cpu, tmp_path, progress=names.append)
    items = {item.name: item for item in measured.items}
    assert len(names) == len(items)
    assert {"matmul_fp32", "copy", "disk_read"} <= set(items)
    a = torch.randn(1024, 1024)
    rates = []
    for _ in range(12):  # others may take a core at any moment
        started = time.perf_counter()
        for _ in range(5):
            a @ a
        rates.append(5 * 2 * 1024**3 / (time.perf_counter() - started) / 1e12)
    assert 0.55 * min(rates) < items["matmul_fp32"].value < 1.8 * max(rates)
    for item in items.values():
        assert min(item.samples) <= item.value <= max(item.samples)
        assert item.datasheet is None
    assert list(tmp_path.iterdir()) == []  # the file that was read is gone


def test_measurements_are_kept_per_device(cpu: HardwareProfile, tmp_path: Path):
    assert remembered(cpu) is None
    item = machine_rates._measurement("copy", "GB/s", 1.0, [0.5, 0.25, 1.0], None)
    assert item.value == 2.0  # the median rate, not the rate of the mean
    taken = machine_rates.Measurements(
        device=machine_rates.device_name(cpu), torch="2", driver=None, taken="now", items=(item,)
    )
    path = remember(taken)
    assert remembered(cpu) == taken
    assert remembered(replace(cpu, cpu=replace(cpu.cpu, name="another"))) is None
    path.write_text("{")
    with pytest.warns(TrainfitWarning, match="damaged"):
        assert remembered(cpu) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot measure the disk"):
        machine_rates._disk(tmp_path / "none")


def test_measuring_leaves_torch_as_it_was(cpu: HardwareProfile, tmp_path: Path):
    before = (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())
    machine_rates._matmul("tf32", "cpu", None)
    assert before == (
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_reaches_a_plausible_share_of_its_datasheet(tmp_path: Path):
    measured = measure(detect(), tmp_path)
    items = {item.name: item for item in measured.items}
    for item in items.values():
        if item.datasheet is not None:
            assert 0.4 < item.value / item.datasheet < 1.05, item.name
    assert items["matmul_tf32"].value > 2 * items["matmul_fp32"].value
    assert items["host_to_device_pinned"].value > items["host_to_device_pageable"].value
