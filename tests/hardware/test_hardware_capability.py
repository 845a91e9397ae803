from __future__ import annotations

import pytest

from trainfit.hardware.catalogue import gpus
from trainfit.hardware.nvml import cuda_wheel, has_kernels, native_dtypes, parse_capability


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), ""),
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 0), "bf16 tf32 fp16"),
        ((8, 6), "bf16 tf32 fp16"),
        ((8, 9), "bf16 tf32 fp16 fp8"),
        ((9, 0), "bf16 tf32 fp16 fp8"),
        ((12, 0), "bf16 tf32 fp16 fp8"),
    ],
)
def test_native_dtypes(capability: tuple[int, int], native: str) -> None:
    found = native_dtypes(capability)
    assert [name for name in ("bf16", "tf32", "fp16", "fp8") if getattr(found, name)] == (
        native.split()
    )


def test_the_rule_agrees_with_every_nvidia_row_of_the_catalogue() -> None:
    rows = [row for row in gpus() if row.vendor == "nvidia"]
    assert len(rows) > 50
    for row in rows:
        found = native_dtypes(parse_capability(row.compute_capability))
        published = (row.native_bf16, row.native_tf32, row.native_fp16, row.native_fp8)
        assert (found.bf16, found.tf32, found.fp16, found.fp8) == published, row.slug


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_80", "sm_86"], True),  # the same major version, an older minor one
        ((8, 0), ["sm_86"], False),  # never a newer minor version
        ((9, 0), ["sm_80", "sm_86"], False),  # machine code does not cross majors
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled by the driver
        ((8, 0), ["compute_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),  # `a` ties it to one GPU
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),  # `f` to one family
        ((8, 7), ["sm_80"], False),  # Jetson Orin
        ((8, 7), ["compute_80"], True),
        ((6, 1), ["sm_75", "sm_80", "sm_90"], False),
        ((6, 1), [], True),  # a build that does not say is not accused
    ],
)
def test_kernels(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert has_kernels(capability, architectures) is runs


def test_machine_code_rule_agrees_with_torch() -> None:
    cuda = pytest.importorskip("torch").cuda
    table = getattr(cuda, "DEVICE_REQUIREMENT", None)
    if table is None:
        pytest.skip("this torch has no table of its own")
    codes = [code for code in table if code != 101]  # renamed to 11.0 in CUDA 13
    for code in codes:
        for device in codes:
            expected = device in table[code]
            assert has_kernels(divmod(device, 10), [f"sm_{code}"]) is expected, (device, code)


@pytest.mark.parametrize(
    ("capability", "driver_cuda", "wheel"),
    [
        ((9, 0), "13.0", "cu130"),
        ((8, 6), "12.4", "cu126"),
        ((7, 0), "13.0", "cu126"),  # CUDA 13 dropped Volta
        ((12, 0), "12.8", None),  # Blackwell came after 12.6
        ((8, 0), "11.8", None),
        (None, None, "cu130"),
    ],
)
def test_wheels(
    capability: tuple[int, int] | None, driver_cuda: str | None, wheel: str | None
) -> None:
    assert cuda_wheel(capability, driver_cuda) == wheel
