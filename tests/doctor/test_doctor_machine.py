"""A healthy machine has no finding; with a fault simulated there is the right one, and exit 1."""

from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import yaml
from hardware_fakes import (
    A30,
    CU130,
    H200,
    HOST,
    T4,
    FakeNvml,
    answering,
    cpu_torch,
    fake_torch,
    numbered,
    process,
    profile,
    used,
)

from trainfit.cli.main import run
from trainfit.core.records import CompileSupport, Note
from trainfit.doctor import (
    Finding,
    MachineFacts,
    examine,
    gather,
    is_healthy,
    machine_checks,
    run_checks,
)
from trainfit.doctor.finding import (
    DiskRates,
    GpuActivity,
    GpuProcess,
    device_nodes,
    disk_rates,
    nccl_version,
    watch_gpus,
)
from trainfit.doctor.machine_checks import CHECKS
from trainfit.hardware import access

HEALTHY = MachineFacts(
    profile=profile(fake_torch(H200), FakeNvml(H200)),
    on_pci=1,
    device_nodes=("/dev/nvidia0",),
    nccl="2.27.3",
    interfaces=("lo", "eth0"),
    environment={"PATH": "/usr/bin", "NCCL_SOCKET_IFNAME": "eth"},
    open_files=65536,
    shm_free_gib=60.0,
    temporary_free_gib=50.0,
    disk=DiskRates(write=900.0, read=2000.0),
)


def facts(**changed: Any) -> MachineFacts:
    return replace(HEALTHY, **changed)


def machine(torch: Any, nvml: Any, host: Any = HOST, **more: Any) -> MachineFacts:
    return facts(profile=profile(torch, nvml, host=host, **more))


def environment(**variables: str) -> MachineFacts:
    return facts(environment={**HEALTHY.environment, **variables})


def working(used_gib: float, *utilisation: int) -> MachineFacts:
    holder = GpuProcess(pid=4321, name="python", memory_gib=used_gib)
    gpu = GpuActivity(
        index=0,
        name="NVIDIA H200",
        memory_gib=140.0,
        used_gib=used_gib,
        processes=(holder,),
        utilisation=utilisation,
    )
    return facts(activity=(gpu,))


def host_profile(**changed: Any) -> MachineFacts:
    return facts(profile=replace(HEALTHY.profile, **changed))


TWO = numbered(A30, 1, 2)
DIFFERENT = (H200, *numbered(T4, 2))
BUSY_OTHERS = used(H200, 80_000, ComputeRunningProcesses=[process(7, 80_000)])
FAULTS: dict[str, tuple[str, MachineFacts]] = {
    "torch broken": ("no_torch", machine(ImportError("libtorch.so"), FakeNvml(H200))),
    "CPU build beside a GPU": ("cpu_torch", machine(cpu_torch(), FakeNvml(H200))),
    "driver older than the build": (
        "cuda_error",
        machine(fake_torch(warning="The NVIDIA driver is too old"), FakeNvml(H200, cuda=12040)),
    ),
    "no kernels for the GPU": (
        "unsupported_architecture",
        machine(fake_torch(replace(T4, capability=(6, 1))), FakeNvml(T4)),
    ),
    "NVML does not answer": ("nvml_broken", machine(fake_torch(H200), None)),
    "no driver, a GPU on the bus": (
        "no_driver",
        facts(profile=profile(fake_torch(), None), device_nodes=()),
    ),
    "a device node without a driver": (
        "no_driver",
        facts(profile=profile(cpu_torch(), None), on_pci=0),
    ),
    "every GPU hidden": ("hidden_gpus", machine(fake_torch(), FakeNvml(H200), visible="")),
    "malformed variable": (
        "visible_devices_malformed",
        machine(fake_torch(H200), FakeNvml(H200), visible="0,x"),
    ),
    "a GPU that torch does not have": (
        "unused_gpus",
        machine(fake_torch(TWO[0]), FakeNvml(*TWO)),
    ),
    "small /dev/shm": (
        "small_shm",
        machine(fake_torch(H200), FakeNvml(H200), replace(HOST, shm_gib=0.0625)),
    ),
    "narrow link": (
        "pcie_narrow",
        machine(
            fake_torch(H200), FakeNvml(answering(H200, CurrPcieLinkWidth=4, MaxPcieLinkWidth=16))
        ),
    ),
    "throttled": (
        "throttled",
        machine(fake_torch(H200), FakeNvml(answering(H200, CurrentClocksEventReasons=0x40))),
    ),
    "NCCL missing": (
        "nccl_missing",
        facts(profile=profile(fake_torch(*TWO), FakeNvml(*TWO)), nccl=None),
    ),
    "NCCL's interface": ("nccl_interface", environment(NCCL_SOCKET_IFNAME="=ib0")),
    "TF32 forbidden": ("tf32_forbidden", environment(NVIDIA_TF32_OVERRIDE="0")),
    "memory held": ("memory_held", working(60.0, 90, 95)),
    "memory held, nobody named": ("memory_held", machine(fake_torch(H200), FakeNvml(BUSY_OTHERS))),
    "idle GPU": ("gpu_underused", working(130.0, 40, 60, 50)),
    "memory to spare": ("gpu_memory_unused", working(70.0, 40, 60)),
    "allocator, malformed": ("allocator", environment(PYTORCH_ALLOC_CONF="expandable_segments")),
    "allocator, split too small": (
        "allocator",
        environment(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:8"),
    ),
    "allocator, contradiction": (
        "allocator",
        environment(
            PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512",
            PYTORCH_ALLOC_CONF="expandable_segments:True",
        ),
    ),
    "allocator, fragments": (
        "allocator",
        environment(PYTORCH_ALLOC_CONF="expandable_segments:False"),
    ),
    "no compiler": (
        "compile_support",
        host_profile(compile=CompileSupport(c_compiler=None, python_headers=True, triton="3")),
    ),
    "no headers": (
        "compile_support",
        host_profile(compile=CompileSupport(c_compiler="cc", python_headers=False, triton="3")),
    ),
    "full /dev/shm": ("shm_full", facts(shm_free_gib=0.01)),
    "few open files": ("file_limit", facts(open_files=256)),
    "full disk": ("disk_space", host_profile(disk_free_gib=2.0)),
    "full temporary folder": ("disk_space", facts(temporary_free_gib=0.1)),
    "unwritable folder": ("disk_unwritable", facts(disk=None)),
    "slow disk": ("disk_slow", facts(disk=DiskRates(write=300.0, read=12.0))),
    "few cores": ("few_cores", host_profile(cpu=replace(HOST.cpu, cores=2))),
    "too many threads": ("threads", environment(OMP_NUM_THREADS="64")),
    "little memory": ("host_memory", host_profile(memory_available_gib=0.7)),
    "a debugging variable": ("slow_variables", environment(CUDA_LAUNCH_BLOCKING="1")),
}


def test_a_healthy_machine_has_no_finding():
    assert examine(HEALTHY) == ()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_nothing_else_is_wrong(name: str):
    expected, ill = FAULTS[name]
    findings = [finding for finding in examine(ill) if finding.severity != "info"]
    ids = {finding.id for finding in findings}
    assert expected in ids
    also = {  # what the simulated machine cannot help showing too
        "gpu_underused": {"memory_held"},
        "gpu_memory_unused": {"memory_held", "gpu_underused"},
    }
    assert ids - {expected} <= also.get(expected, set())
    for finding in findings:
        assert finding.evidence
        assert finding.mend
        assert not is_healthy([finding])


@pytest.mark.parametrize("name", FAULTS)
def test_the_command_ends_with_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    expected, ill = FAULTS[name]
    monkeypatch.setattr("trainfit.doctor.gather", lambda: ill)
    assert run(["doctor"]) == 1
    page = capsys.readouterr().out
    assert f"({expected})" in page
    assert "Something is wrong." in page


def test_every_check_that_can_be_a_fault_is_simulated():
    simulated = {expected for expected, _ in FAULTS.values()}
    only_worth_knowing = {
        "no_gpu",
        "driver_behind",
        "mixed_gpus",
        "mig",
        "unknown_gpu",
        "emulated_bf16",
        "cpu_limited",
    }
    assert simulated | only_worth_knowing == {check.fault.id for check in CHECKS}


INFOS: dict[str, tuple[str, MachineFacts]] = {
    "no GPU, CPU build": (
        "no_gpu",
        facts(profile=profile(cpu_torch(), None), on_pci=0, device_nodes=()),
    ),
    "no GPU, CUDA build": (
        "no_driver",
        facts(profile=profile(fake_torch(), None), on_pci=0, device_nodes=()),
    ),
    "a T4 emulates bf16": ("emulated_bf16", machine(fake_torch(T4), FakeNvml(T4))),
    "a driver of the same major version": (
        "driver_behind",
        machine(
            fake_torch(H200, version="2.9+cu128", cuda="12.8", architectures=CU130),
            FakeNvml(H200, cuda=12040),
        ),
    ),
    "different GPUs": ("mixed_gpus", machine(fake_torch(*DIFFERENT), FakeNvml(*DIFFERENT))),
    "some hidden": (
        "hidden_gpus",
        machine(fake_torch(TWO[0]), FakeNvml(*TWO), visible="0"),
    ),
    "a quota": (
        "cpu_limited",
        machine(fake_torch(H200), FakeNvml(H200), replace(HOST, cpu=replace(HOST.cpu, cores=8))),
    ),
    "busy, with memory to spare": ("gpu_memory_unused", working(5.0, 95, 99)),
}


@pytest.mark.parametrize("name", INFOS)
def test_what_is_only_worth_knowing_leaves_the_machine_healthy(name: str):
    expected, known = INFOS[name]
    findings = examine(known)
    assert expected in {finding.id for finding in findings}
    assert is_healthy(findings), findings


def test_processes_are_named_by_number_and_left_alone():
    [finding] = [f for f in examine(working(60.0, 95, 95)) if f.id == "memory_held"]
    assert "PID 4321 (python) 60.0 GiB" in finding.evidence
    assert "ps -o pid,user,etime,cmd -p 4321" in finding.mend
    assert "kill " not in finding.mend


@pytest.mark.parametrize(
    ("share", "severity"), [(20, "warning"), (69, "warning"), (70, "info"), (79, "info")]
)
def test_the_guides_bounds_of_utilisation(share: int, severity: str):
    [finding] = [f for f in examine(working(130.0, share, share)) if f.id == "gpu_underused"]
    assert finding.severity == severity
    assert "training.batch_size" in finding.mend.splitlines()[0]
    assert "training.num_workers" in finding.mend


@pytest.mark.parametrize("busy", [80, 95])
def test_a_busy_gpu_is_not_underused(busy: int):
    assert "gpu_underused" not in {f.id for f in examine(working(130.0, busy, busy))}


def test_worst_comes_first():
    both = replace(FAULTS["CPU build beside a GPU"][1], open_files=10)
    severities = [finding.severity for finding in examine(both)]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert severities[0] == "error"


def test_every_note_of_detection_is_a_finding():
    rows = yaml.safe_load(Path(access.__file__).with_name("notes.yaml").read_text())
    codes = {row.get("code", name) for name, row in rows.items()}
    assert len(codes) > 10
    # memory_in_use is said by process number, a CPU's bf16 is tried by `trainfit check` alone, and
    # cores are assumed of machines that are not here.
    elsewhere = {"memory_in_use", "cpu_bf16_dies", "assumed_cores"}
    assert codes <= {check.fault.id for check in CHECKS} | elsewhere


def test_every_function_has_a_row_of_signs_yaml():
    """A check is found by its name, so one without a row would never run."""
    for module in (machine_checks, run_checks):
        found = {
            n for n, f in vars(module).items() if getattr(f, "__module__", "") == module.__name__
        }
        public = {n for n in found if isinstance(getattr(module, n), FunctionType) and n[0] != "_"}
        assert public - {"examine", "examine_run"} <= {check.fault.id for check in module.CHECKS}


# ── gathering ─────────────────────────────────────────────────────────────────────────────────


def test_who_works_on_a_gpu_is_watched_for_a_while():
    busy = iter([10, 90] * 10)
    card = used(
        H200,
        50_000,
        ComputeRunningProcesses=[process(7, 40_000), process(42, 10_000)],
        UtilizationRates=lambda: SimpleNamespace(gpu=next(busy)),
    )
    slept: list[float] = []
    [gpu, idle] = watch_gpus(
        lambda: FakeNvml(card, T4), 42, name_of={7: "python"}.get, sleep=slept.append
    )
    assert [(p.pid, p.name) for p in gpu.processes] == [(7, "python")]
    assert gpu.processes[0].memory_gib == pytest.approx(40_000 / 1024)
    assert set(gpu.utilisation) == {10, 90}
    assert sum(slept) == pytest.approx(1.0)
    assert idle.processes == idle.utilisation == ()


def test_nobody_is_waited_for_on_an_idle_machine():
    slept: list[float] = []
    watch_gpus(lambda: FakeNvml(H200), 1, name_of=lambda pid: None, sleep=slept.append)
    assert slept == []
    assert watch_gpus(lambda: FakeNvml(error=9), 1, name_of=lambda pid: None) == ()


def test_device_nodes_are_those_of_gpus(tmp_path: Path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert device_nodes(tmp_path) == ("/dev/nvidia0", "/dev/nvidia1")


def test_the_disk_is_tried_and_left_as_it_was(tmp_path: Path):
    rates = disk_rates(tmp_path, piece=1 << 16)
    assert rates is not None
    assert min(rates.read, rates.write) > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_rates(tmp_path / "none") is None


def test_nccl_is_asked_of_torch():
    def torch(available: bool) -> Any:
        return SimpleNamespace(
            distributed=SimpleNamespace(
                is_available=lambda: True, is_nccl_available=lambda: available
            ),
            cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 3))),
        )

    assert nccl_version(lambda: torch(True)) == "2.27.3"
    assert nccl_version(lambda: torch(False)) is None


def test_this_machine_can_be_looked_at():
    found = gather()
    assert found.profile.cpu.cores >= 1
    assert found.open_files is None or found.open_files > 0
    assert all(isinstance(finding, Finding) for finding in examine(found))


def test_a_note_without_a_fix_still_has_a_finding():
    mixed = facts(profile=replace(HEALTHY.profile, notes=(Note(code="mig", text="MIG is on."),)))
    [finding] = examine(mixed)
    assert finding.evidence == "MIG is on."
