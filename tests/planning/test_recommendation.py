from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.catalogue import find, gpus
from trainfit.hardware import as_if
from trainfit.planning import preset_for_memory, recommend, workers
from trainfit.records import CompileSupport, HardwareProfile


def machine(*slugs: str, cores: int = 16, triton: str | None = "3.6") -> HardwareProfile:
    """A machine with these GPUs, as detect() would describe it."""
    profiles = [as_if(find(slug)) for slug in slugs]
    base = profiles[0] if profiles else replace(as_if(find("t4")), gpus=())
    return replace(
        base,
        gpus=tuple(replace(p.gpus[0], index=i) for i, p in enumerate(profiles)),
        cpu=replace(base.cpu, cores=cores),
        compile=CompileSupport(c_compiler="cc", python_headers=True, triton=triton),
        simulated=False,
    )


# The hardware guide's rows: batch, workers, compile, checkpointing, accumulation.
GUIDE = {
    "rtx-4090": (16, 8, True, False, 1),
    "rtx-3090": (12, 6, False, False, 1),
    "rtx-3060-12gb": (4, 4, False, True, 4),
    "rtx-2080-ti": (4, 3, False, True, 4),
}


@pytest.mark.parametrize("slug", GUIDE)
def test_a_gpu_of_the_guide_gets_its_row(slug: str):
    r = recommend(machine(slug))
    row = (r.batch_size, r.num_workers, r.compile, r.gradient_checkpointing)
    assert (*row, r.gradient_accumulation_steps) == GUIDE[slug]


def test_a_machine_without_a_gpu_gets_the_cpu_row():
    r = recommend(machine())
    assert (r.preset, r.batch_size, r.gradient_accumulation_steps) == ("cpu", 2, 8)
    assert (r.precision, r.tf32, r.compile) == ("fp32", False, False)


@pytest.mark.parametrize("slug", sorted(spec.slug for spec in gpus()))
def test_precision_follows_the_gpu_and_never_emulation(slug: str):
    spec, r = find(slug), recommend(machine(slug))
    assert (r.precision == "bf16") == spec.native_bf16
    assert r.precision != "fp16" or spec.native_fp16
    assert r.tf32 == spec.native_tf32
    if spec.compute_capability == "7.5":
        assert (r.precision, r.tf32) == ("fp16", False)


def test_every_setting_has_a_reason():
    r = recommend(machine("a100"))
    assert {reason.setting for reason in r.reasons} == {
        name for name in r.__dataclass_fields__ if name != "reasons"
    }
    for reason in r.reasons:
        assert reason.why
        assert reason.value == getattr(r, reason.setting)


def test_the_smallest_of_several_gpus_decides():
    r = recommend(machine("rtx-4090", "rtx-3060-12gb"))
    assert r.preset == "gpu_low_mem"
    assert "smallest" in r.reasons[0].why


def test_compile_is_off_where_it_would_fail():
    r = recommend(machine("rtx-4090", triton=None))
    assert not r.compile
    why = {reason.setting: reason.why for reason in r.reasons}["compile"]
    assert "Triton missing" in why


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
