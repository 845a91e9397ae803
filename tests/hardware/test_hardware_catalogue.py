"""The catalogue against what is known of the chips independently of its source."""

from collections import Counter
from itertools import pairwise

import pytest

from trainfit.conf import options
from trainfit.core.errors import BadInput, TrainfitWarning
from trainfit.hardware.catalogue import GpuSpec, find, gpus, lookup

ALL = {spec.slug: spec for spec in gpus()}

# Dense multiply-adds with fp32 accumulation that one SM does per clock, times two; from the
# architecture whitepapers. GeForce cards do half of what the same chip does on a workstation card.
FLOPS_PER_SM_CLOCK = {
    ("7.0", False): 1024,
    ("7.5", False): 1024,
    ("7.5", True): 512,
    ("8.0", False): 2048,
    ("8.6", False): 1024,
    ("8.6", True): 512,
    ("8.9", False): 1024,
    ("8.9", True): 512,
    ("9.0", False): 4096,
    ("12.0", False): 1024,
    ("12.0", True): 512,
}
CUT_FOR_EXPORT_OR_CLASS = {"h20-96gb", "h20-141gb", "l20", "l40", "a10g"}


def fp32_clock(spec: GpuSpec) -> float:
    lanes = 64 if spec.compute_capability in ("7.0", "7.5", "8.0") else 128
    return spec.fp32_tflops * 1e6 / (spec.sm_count * lanes * 2)


def per_clock(spec: GpuSpec) -> int | None:
    if spec.slug in CUT_FOR_EXPORT_OR_CLASS:
        return None
    return FLOPS_PER_SM_CLOCK.get((spec.compute_capability, "GeForce" in "".join(spec.names)))


@pytest.mark.parametrize("slug", sorted(slug for slug, spec in ALL.items() if per_clock(spec)))
def test_matrix_rate_and_vector_rate_imply_the_same_clock(slug: str):
    spec = ALL[slug]
    clock = spec.fp16_tflops * 1e6 / (spec.sm_count * (per_clock(spec) or 0))
    # Hopper's datasheets quote the matrix units at a lower clock than the vector units.
    tolerance = 0.14 if spec.compute_capability == "9.0" else 0.02
    assert clock == pytest.approx(fp32_clock(spec), rel=tolerance)


def test_there_are_enough_rows_and_each_has_a_source():
    assert len(ALL) == len(gpus()) >= 120
    assert all(len(spec.source) > 10 for spec in gpus())
    assert {spec.vendor for spec in gpus()} == {"nvidia", "amd", "apple"}


@pytest.mark.parametrize("slug", sorted(ALL))
def test_a_row_agrees_with_itself(slug: str):
    spec = ALL[slug]
    assert 0.6 < spec.memory_gib / spec.memory_gb <= 1.0
    assert spec.native_bf16 == (spec.bf16_tflops is not None)
    assert spec.native_tf32 == (spec.tf32_tflops is not None)
    assert spec.native_fp8 == (spec.fp8_tflops is not None)
    if spec.vendor == "nvidia":
        capability = float(spec.compute_capability)
        assert spec.native_bf16 == spec.native_tf32 == (capability >= 8.0)
        assert spec.native_fp16 == (capability >= 7.0)
        assert spec.native_fp8 == (capability >= 8.9)
    if spec.native_fp8:
        assert spec.fp8_tflops == pytest.approx(2 * spec.fp16_tflops, rel=0.02)
    if spec.native_tf32:
        assert spec.fp16_tflops == pytest.approx(2 * (spec.tf32_tflops or 0), rel=0.02)
    assert spec.preset is None or spec.preset in options("nli", "hardware")


def test_names_are_told_apart_by_name_or_by_memory():
    shared = [name for name, n in Counter(x for s in gpus() for x in s.names).items() if n > 1]
    for name in shared:
        rows = sorted((s for s in gpus() if name in s.names), key=lambda s: s.memory_gib)
        for smaller, larger in pairwise(rows):
            assert smaller.memory_gib * 1.07 < larger.memory_gib * 0.93
        for row in rows:
            assert lookup(name, row.memory_gib) is row
            assert lookup(name, row.memory_gib * 1.06) is row
            assert lookup(name, row.memory_gib * 0.94) is row


def slug(name: str, memory_gib: float | None = None) -> str | None:
    spec = lookup(name, memory_gib)
    return None if spec is None else spec.slug


def test_near_names_are_not_mixed_up():
    assert slug("NVIDIA L40S") == "l40s"
    assert slug("NVIDIA L4") == "l4"
    assert slug("NVIDIA H200") == "h200-sxm-141gb"
    assert slug("NVIDIA H200 NVL") == "h200-nvl-141gb"
    assert slug("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert slug("NVIDIA GeForce RTX 4090 Laptop GPU") == "rtx-4090-laptop"
    assert slug("NVIDIA GeForce RTX 3080", 11.6) == "rtx-3080-12gb"
    assert slug("NVIDIA GeForce RTX 3080", 10.0) == "rtx-3080-10gb"
    assert slug("Tesla T4") == "t4"


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA H300", None),
        ("H200", None),
        ("nvidia h200", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75),
        ("NVIDIA GeForce RTX 3080", None),
        ("NVIDIA GeForce RTX 3080", 20.0),
        ("Orin", 7.44),
        ("", None),
    ],
)
def test_an_unknown_gpu_is_none_with_a_warning(name: str, memory: float | None):
    with pytest.warns(TrainfitWarning):
        assert lookup(name, memory) is None


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("h200", "h200-sxm-141gb"),
        ("4090", "rtx-4090"),
        ("a100", "a100-sxm4-80gb"),
        ("RTX 4090", "rtx-4090"),
        ("rtx_3090", "rtx-3090"),
        ("t4", "t4"),
        ("v100", "v100-sxm2-16gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("2080ti", "rtx-2080-ti"),
        ("GeForce RTX4070 Ti Super", "rtx-4070-ti-super"),
        ("Tesla V100 32GB", "v100-sxm2-32gb"),
        ("a100 80gb pcie", "a100-pcie-80gb"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("RTX4090", "rtx-4090"),
        ("4060ti", "rtx-4060-ti-8gb"),
        ("nvidia-t4", "t4"),
        ("Tesla V100", "v100-sxm2-16gb"),
        ("RTX 3090 24GB", "rtx-3090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("3060 8 GB", "rtx-3060-8gb"),
    ],
)
def test_a_short_form_means_the_usual_member(word: str, expected: str):
    assert find(word).slug == expected


def test_short_forms_are_unambiguous():
    words = (word for spec in gpus() for word in (spec.slug, *spec.short_names))
    counts = Counter(word.replace("-", "") for word in words)
    assert [word for word, n in counts.items() if n > 1] == []


def test_no_spelling_of_one_gpu_means_another():
    for spec in gpus():
        for word in (spec.slug, *spec.short_names):
            for spelling in (
                word.replace("-", ""),
                word.upper().replace("-", " "),
                f"NVIDIA {word}",
            ):
                assert find(spelling) is spec


@pytest.mark.parametrize("word", ["", " ", "nvidia", "rtx", "geforce rtx", "-"])
def test_a_brand_alone_is_no_gpu(word: str):
    with pytest.raises(BadInput, match="unknown GPU"):
        find(word)


def test_a_name_with_another_memory_is_unknown():
    with pytest.raises(BadInput, match="unknown GPU 'T4 24GB'"):
        find("T4 24GB")


def test_several_gpus_are_named_by_their_number():
    with pytest.raises(BadInput, match=r"'2x T4' is several GPUs; .* --gpu t4 --gpus 2`"):
        find("2x T4")


def test_an_unknown_slug_gets_the_nearest():
    with pytest.raises(BadInput, match=r"unknown GPU 'rtx-4099'; did you mean rtx-4090"):
        find("rtx-4099")


GUIDE_MFU = {
    "a30": ((15, 20), (25, 30), (12, 18)),
    "a40": ((20, 25), (30, 35), (20, 30)),
    "a100-sxm4-80gb": ((25, 30), (35, 40), (16, 24)),
    "a100-pcie-40gb": ((25, 30), (35, 40), (16, 24)),
    "v100-sxm2-16gb": ((15, 20), (25, 30), (8, 12)),
    "rtx-4090": ((20, 25), (30, 35), (12, 18)),
    "rtx-4080": ((15, 20), (25, 30), (8, 12)),
    "rtx-3090": ((18, 22), (28, 32), (10, 16)),
}


@pytest.mark.parametrize("slug", sorted(GUIDE_MFU))
def test_mfu_targets_are_the_tuning_guides(slug: str):
    spec = ALL[slug]
    assert (spec.mfu_good, spec.mfu_excellent, spec.batch_advice) == GUIDE_MFU[slug]


def test_published_peaks_of_well_known_gpus():
    assert ALL["h200-sxm-141gb"].bf16_tflops == pytest.approx(989.4)
    assert ALL["a100-sxm4-80gb"].bf16_tflops == 312
    assert ALL["rtx-4090"].bf16_tflops == pytest.approx(165.2)
    assert ALL["rtx-3090"].bf16_tflops == pytest.approx(71.2)
    assert ALL["t4"].fp16_tflops == 65
    assert ALL["l40s"].peak_tflops("tf32") == 183
