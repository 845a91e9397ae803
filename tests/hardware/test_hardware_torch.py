from __future__ import annotations

import warnings

import pytest
from hardware_fakes import GIB, H200, MI250X, T4, cpu_torch, fake_torch, give, numbered

from trainfit.hardware.access import TorchReport, probe_torch


def report(torch: object, chip: str | None = None) -> TorchReport:
    return probe_torch(lambda: give(torch), lambda name: chip)


def test_a_cuda_build() -> None:
    found = report(fake_torch(H200))
    assert found.build is not None
    assert (found.build.backend, found.build.version) == ("cuda", "2.13.0+cu130")
    assert (found.build.cuda, found.build.cudnn, found.build.hip) == ("13.0", "9.19.0", None)
    (device,) = found.devices
    assert (device.name, device.capability, device.sm_count) == ("NVIDIA H200", "9.0", 132)
    assert (device.uuid, device.pci) == (H200.bare_uuid, "0000:01:00")
    assert device.memory_bytes == int(139.8 * GIB)
    assert device.has_context is False


@pytest.mark.parametrize(
    ("number", "text"), [(91900, "9.19.0"), (90100, "9.1.0"), (8902, "8.9.2"), (None, None)]
)
def test_cudnn_versions(number: int | None, text: str | None) -> None:
    torch = fake_torch(H200)
    torch.backends.cudnn.version = lambda: number
    build = report(torch).build
    assert build is not None
    assert build.cudnn == text


def test_a_cudnn_that_does_not_fit_has_no_version() -> None:
    torch = fake_torch(H200)
    torch.backends.cudnn.version = lambda: give(RuntimeError("cuDNN version incompatibility"))
    found = report(torch)
    assert found.build is not None
    assert found.build.cudnn is None
    assert len(found.devices) == 1


def test_an_older_torch_without_uuid_and_pci() -> None:
    torch = fake_torch(T4, identity=(False, False))
    del torch._C._cuda_hasPrimaryContext
    (device,) = report(torch).devices
    assert (device.uuid, device.pci, device.has_context) == (None, None, None)


def test_a_warning_of_a_broken_driver_is_the_reason_and_does_not_leak() -> None:
    text = "CUDA initialization: The NVIDIA driver on your system is too old\nPlease update"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = report(fake_torch(warning=text))
    assert found.devices == ()
    assert found.error == "CUDA initialization: The NVIDIA driver on your system is too old"


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_an_error_while_asking_is_its_first_line(kind: type[Exception]) -> None:
    found = report(fake_torch(error=kind("CUDA unknown error\nat a place")))
    assert (found.devices, found.error) == ((), "CUDA unknown error")


def test_one_broken_gpu_leaves_the_others() -> None:
    found = report(fake_torch(*numbered(H200, 1, 2), broken=(0,)))
    assert [device.index for device in found.devices] == [1]
    assert found.error == "GPU 0: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'torch'"),
        OSError("libcudart.so.13: cannot open shared object file"),
    ],
)
def test_a_torch_that_cannot_be_imported(error: Exception) -> None:
    assert report(error) == TorchReport(error=str(error))


def test_rocm() -> None:
    found = report(fake_torch(MI250X, version="2.13.0+rocm7.0", cuda=None, hip="7.0.5"))
    assert found.build is not None
    assert (found.build.backend, found.build.hip, found.build.cuda) == ("rocm", "7.0.5", None)
    (device,) = found.devices
    assert (device.vendor, device.capability) == ("amd", "gfx90a")
    assert found.architectures == ()


def test_apple() -> None:
    torch = fake_torch(version="2.13.0", cuda=None, mps=96 * GIB)
    found = report(torch, chip="Apple M3 Max")
    assert found.build is not None
    assert found.build.backend == "mps"
    (device,) = found.devices
    assert (device.vendor, device.name, device.capability) == ("apple", "Apple M3 Max", "mps")
    assert device.memory_bytes == 96 * GIB


def test_apple_without_a_bound_or_a_name() -> None:
    torch = fake_torch(version="2.13.0", cuda=None, mps=1)
    del torch.mps.recommended_max_memory
    (device,) = report(torch).devices
    assert (device.name, device.memory_bytes) == ("Apple GPU", None)


def test_a_cpu_build_asks_no_gpu() -> None:
    torch = cpu_torch()
    del torch.cuda
    found = report(torch)
    assert found.build is not None
    assert (found.build.backend, found.devices, found.error) == ("cpu", (), None)
