from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.catalogue import catalogue_gpu, find
from trainfit.planning import preset_for, preset_for_memory, workers


@pytest.mark.parametrize(
    ("slug", "name"),
    [
        ("rtx-4090", "gpu_4090"),
        ("rtx-3090", "gpu_3090"),
        ("rtx-3060-12gb", "gpu_low_mem"),
        ("t4", "t4"),
        ("a100", "a100"),
    ],
)
def test_a_gpu_of_the_guides_gets_their_row(slug: str, name: str):
    gpu = catalogue_gpu(find(slug))
    assert preset_for(gpu)[0] == name
    assert gpu.name in preset_for(gpu)[1]


def test_without_a_gpu_the_cpus_and_of_an_unknown_one_the_cautious_preset():
    assert preset_for(None)[0] == "cpu"
    unknown = replace(catalogue_gpu(find("rtx-4090")), slug=None, name="A card", memory_gib=23.6)
    name, why = preset_for(unknown)
    assert name == "gpu_3090"
    assert "cautious" in why
    assert "23.6 GiB" in why


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        (24, "gpu_3090"),
        (23.56, "gpu_3090"),
        (25.4, "gpu_3090"),  # a 3090 in decimal GB: not the 4090's row
        (12, "gpu_low_mem"),
        (12.9, "gpu_low_mem"),  # a 12 GB card in decimal GB
        (8, "gpu_low_mem"),
        (14.56, "t4"),
        (16, "t4"),
        (17.2, "t4"),
        (32, "rtx_5090"),
        (39.6, "a100"),
        (44.4, "a40"),
        (79.2, "h100"),
        (139.8, "h200"),
        (2, "gpu_low_mem"),
    ],
)
def test_memory_alone_gets_the_cautious_row(memory: float, name: str):
    assert preset_for_memory(memory) == name


@given(st.integers(1, 256), st.none() | st.floats(0.5, 300))
def test_workers_follow_the_rule(cores: int, memory: float | None):
    n = workers(cores, memory)
    assert 0 <= n <= 8
    assert n <= max(0, cores - 2)
    if memory is not None:
        assert n * 3 < memory + 1  # a 24 GB card shows 23.5
    if cores >= 10 and (memory is None or memory >= 24):
        assert n == 8
