"""Recorded machines: a torch and a pynvml made of plain values, and trees of /proc and /sys."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from trainfit.core.records import CompileSupport, Cpu, HardwareProfile, Note
from trainfit.hardware.access import probe_torch
from trainfit.hardware.detection import assemble
from trainfit.hardware.host import Host
from trainfit.hardware.nvml import probe_nvml

MIB, GIB = 1 << 20, 1 << 30
PID = 4242
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")

HOST = Host(
    cpu=Cpu(name="AMD EPYC 9654", cores=16, host_cores=16, native_bf16=True),
    affinity=16,
    memory_gib=128.0,
    memory_available_gib=120.0,
    shm_gib=64.0,
    disk_free_gib=500.0,
    nvidia_devices=0,
    platform="Linux",
    python="3.12.3",
)


@dataclass(frozen=True)
class Card:
    """A GPU as both torch and the driver would describe it; `driver` overrides NVML's answers."""

    name: str
    total_mib: int
    torch_gib: float
    capability: tuple[int, int]
    sms: int
    number: int = 1
    """Makes the UUID and the PCI bus of this card."""
    driver: dict[str, Any] = field(default_factory=dict)
    slices: tuple[Card, ...] = ()
    gcn: str = ""

    @property
    def bare_uuid(self) -> str:
        return f"{self.number:08x}-d72c-4106-c12f-20bd9faed9f6"


H200 = Card(
    "NVIDIA H200", 143771, 139.8, (9, 0), 132, driver={"UtilizationRates": SimpleNamespace(gpu=0)}
)
T4 = Card("Tesla T4", 15360, 15102 / 1024, (7, 5), 40)
A30 = Card("NVIDIA A30", 24576, 23.6, (8, 0), 56)
RTX3090 = Card("NVIDIA GeForce RTX 3090", 24576, 23.56, (8, 6), 82)
RTX4090 = Card("NVIDIA GeForce RTX 4090", 24564, 23.52, (8, 9), 128)
SLICE = Card("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, 4.75, (8, 0), 14, number=77)
A100_MIG = Card(
    "NVIDIA A100-SXM4-40GB",
    40960,
    39.56,
    (8, 0),
    108,
    slices=(SLICE,),
    driver={"MigMode": [1, 1], "MaxMigDeviceCount": 7},
)
MI250X = Card("AMD Instinct MI250X", 65520, 63.98, (9, 0), 110, gcn="gfx90a:sramecc+:xnack-")


def numbered(card: Card, *numbers: int) -> tuple[Card, ...]:
    return tuple(replace(card, number=number) for number in numbers)


def answering(card: Card, **driver: Any) -> Card:
    """The card with other answers of its driver."""
    return replace(card, driver={**card.driver, **driver})


# ── torch ─────────────────────────────────────────────────────────────────────────────────────


def properties(card: Card, *, uuid: bool = True, pci: bool = True) -> SimpleNamespace:
    found = SimpleNamespace(
        name=card.name,
        total_memory=int(card.torch_gib * GIB),
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.sms,
        gcnArchName=card.gcn,
    )
    if uuid:
        found.uuid = card.bare_uuid
    if pci:
        found.pci_domain_id, found.pci_bus_id, found.pci_device_id = 0, card.number, 0
    return found


def fake_torch(
    *cards: Card,
    version: str = "2.13.0+cu130",
    cuda: str | None = "13.0",
    hip: str | None = None,
    architectures: tuple[str, ...] = CU130,
    identity: tuple[bool, bool] = (True, True),
    has_context: bool = False,
    warning: str = "",
    error: Exception | None = None,
    broken: tuple[int, ...] = (),
    mps: int | None = None,
) -> Any:
    """A torch with these devices; `mps` is the working-set bound of an Apple GPU."""

    def is_available() -> bool:
        if error is not None:
            raise error
        if warning:
            warnings.warn(warning, stacklevel=2)
        return bool(cards)

    def get_device_properties(index: int) -> SimpleNamespace:
        if index in broken:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore text")
        return properties(cards[index], uuid=identity[0], pci=identity[1])

    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: len(cards),
            get_device_properties=get_device_properties,
            get_arch_list=lambda: list(architectures),
            # The trap: torch says so even for a T4.
            is_bf16_supported=lambda: True,
        ),
        backends=SimpleNamespace(
            cudnn=SimpleNamespace(version=lambda: 91900),
            mps=SimpleNamespace(is_built=lambda: mps is not None, is_available=lambda: bool(mps)),
        ),
        mps=SimpleNamespace(recommended_max_memory=lambda: mps),
        _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda index: has_context),
    )


def cpu_torch() -> Any:
    return fake_torch(version="2.13.0+cpu", cuda=None, architectures=())


# ── NVML ──────────────────────────────────────────────────────────────────────────────────────


class FakeNvml:
    """The binding of a recorded driver: what it has no answer to is "not supported".

    The errors and constants are pynvml's own, and each call must fit the real signature.
    """

    def __init__(
        self, *cards: Card, driver: str = "580.159.04", cuda: int = 13000, error: int | None = None
    ) -> None:
        self.cards, self.driver, self.cuda, self.error = cards, driver, cuda, error
        self.asked: set[str] = set()
        self.unknown: set[str] = set()
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if not hasattr(pynvml, name):
            self.unknown.add(name)
        real = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(real):
            return real
        self.asked.add(name)

        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            return self._answer(name.removeprefix("nvml"), arguments)

        return call

    def _answer(self, question: str, arguments: tuple[Any, ...]) -> Any:
        match question:
            case "Init":
                if self.error is not None:
                    raise pynvml.NVMLError(self.error)
                self.open += 1
                return None
            case "Shutdown":
                self.open -= 1
                return None
            case "SystemGetDriverVersion":
                return self.driver
            case "SystemGetCudaDriverVersion_v2":
                return self.cuda
            case "DeviceGetCount":
                return len(self.cards)
            case "DeviceGetHandleByIndex":
                return _handle(self.cards[arguments[0]])
            case "DeviceGetMigDeviceHandleByIndex":
                card, index = arguments
                if index >= len(card.slices):
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
                return card.slices[index]
        card, *others = arguments
        return _card_answer(card, question.removeprefix("DeviceGet"), others)


def _handle(card: Card) -> Card:
    if "Lost" in card.driver:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return card


def _card_answer(card: Card, question: str, others: list[Any]) -> Any:
    known = {
        "Name": card.name,
        "UUID": f"{'MIG' if ' MIG ' in card.name else 'GPU'}-{card.bare_uuid}",
        "PciInfo": SimpleNamespace(domain=0, bus=card.number, device=0),
        "MemoryInfo": SimpleNamespace(total=card.total_mib * MIB, used=4 * MIB),
        "CudaComputeCapability": card.capability,
        **card.driver,
    }
    if question not in known:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    answer = known[question]
    return answer(*others) if callable(answer) else answer


def used(card: Card, mib: int, **driver: Any) -> Card:
    """The card with so much of its memory in use."""
    memory = SimpleNamespace(total=card.total_mib * MIB, used=mib * MIB)
    return answering(card, MemoryInfo=memory, **driver)


def process(pid: int, mib: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)


# ── the machine ───────────────────────────────────────────────────────────────────────────────


def profile(
    torch: Any = None,
    nvml: FakeNvml | ImportError | None = None,
    *,
    visible: str | None = None,
    host: Host = HOST,
    chip: str | None = None,
) -> HardwareProfile:
    """What detect() makes of such a machine; without NVML given, its library is not found."""
    binding = FakeNvml(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND) if nvml is None else nvml
    made = assemble(
        host=host,
        torch=probe_torch(lambda: give(torch or cpu_torch()), lambda name: chip),
        nvml=probe_nvml(lambda: give(binding), PID),
        visible_devices=visible,
        compile=CompileSupport(c_compiler="/usr/bin/cc", python_headers=True, triton="3.6.0"),
    )
    assert HardwareProfile.from_json(made.to_json()) == made
    return made


def give(thing: Any) -> Any:
    if isinstance(thing, Exception):
        raise thing
    return thing


def codes(made: HardwareProfile) -> list[str]:
    return [note.code for note in made.notes]


def note(made: HardwareProfile, code: str) -> Note:
    """The one note of that code, which is one sentence with a fix."""
    (found,) = [note for note in made.notes if note.code == code]
    assert found.text.endswith(".")
    assert "\n" not in found.text
    assert found.fix.endswith(".")
    return found


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a /proc and /sys below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
