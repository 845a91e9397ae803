"""Every ill log is diagnosed, no harmless one is, and nobody's text is shown."""

import random
import re
from pathlib import Path

import pytest
import yaml
from doctor_logs import HARMLESS, ILL, SECRET, ill
from hypothesis import given
from hypothesis import strategies as st

from trainfit.core.errors import BadInput
from trainfit.doctor import Finding, diagnose_text, read_log
from trainfit.doctor.signs import Pattern, patterns, read_numbers

PATTERNS = patterns()
ENDINGS = yaml.safe_load(Path(__file__).with_name("endings.yaml").read_text())


def of(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.id for finding in findings}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_log_is_diagnosed(name: str):
    expected, text = ILL[name]
    findings = diagnose_text(ill(text))
    assert of(findings) == expected
    for finding in findings:
        assert SECRET not in finding.to_json()
        assert "zyxquabberword" not in finding.to_json()
        assert finding.mend
        assert finding.why
        assert finding.evidence


def test_there_are_enough_of_both():
    assert len(ILL) >= 20
    assert len(HARMLESS) >= 10


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_log_is_left_alone(name: str):
    assert diagnose_text(HARMLESS[name]) == ()


def test_all_harmless_logs_together_are_left_alone():
    assert diagnose_text("\n".join(HARMLESS.values())) == ()


@pytest.mark.parametrize("id", ENDINGS)
def test_the_end_of_a_log_has_its_cause(id: str):
    for text in ENDINGS[id]:
        assert of(diagnose_text(ill(text))) == {id}, text


def test_every_pattern_is_shown_by_an_ill_log():
    shown = set().union(*(expected for expected, _ in ILL.values()))
    assert shown | set(ENDINGS) == {pattern.fault.id for pattern in PATTERNS}


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.fault.id)
def test_the_message_that_a_fault_is_shown_with_is_one_of_its_own(pattern: Pattern):
    assert of(diagnose_text(pattern.like)) == {pattern.fault.id}


# ── the numbers of an out-of-memory message ───────────────────────────────────────────────────


def test_fragmentation_is_told_by_its_amount():
    [finding] = diagnose_text(ILL["torch 2.4, much reserved but unallocated"][1])
    assert "tried to allocate 2.25 GiB" in finding.evidence
    assert "free 1.02 GiB" in finding.evidence
    assert "reserved but unallocated 3.10 GiB" in finding.evidence
    first = finding.mend.splitlines()[0]
    assert "3.1 GiB are reserved but unallocated" in first
    assert "expandable_segments:True" in first


def test_the_old_form_has_the_difference():
    numbers = read_numbers(ILL["torch 1.13, out of memory, reserved far over allocated"][1])
    assert numbers.unallocated == pytest.approx(21.40 - 16.10)
    assert numbers.free == pytest.approx(812 / 1024)


def test_other_processes_come_first_where_they_hold_the_memory():
    [finding] = diagnose_text(ILL["torch 2.6, a second process on the GPU"][1])
    assert "ps -o pid,user,etime,cmd -p 5142" in finding.mend.splitlines()[0]
    assert "61.30 GiB" in finding.evidence


def test_torch_21_names_its_own_process_which_is_not_another():
    text = ILL["torch 2.1, its own misspelling and its own process by number"][1]
    assert read_numbers(text).others == ()
    [finding] = diagnose_text(text)
    assert "training.batch_size" in finding.mend.splitlines()[0]
    two = text.replace(
        "Of the allocated", "Process 99 has 9.00 GiB memory in use. Of the allocated"
    )
    assert read_numbers(two).others == ((99, 9.0),)


def test_one_huge_allocation_asks_for_shorter_sequences_first():
    [finding] = diagnose_text(ILL["torch 2.9, private pools"][1])
    assert "data.max_length" in finding.mend.splitlines()[0]
    assert "7.8 GiB" in finding.mend.splitlines()[0]


@given(
    tried=st.floats(0.01, 8), capacity=st.sampled_from([14.75, 23.64, 79.15]), share=st.floats(0, 1)
)
def test_what_is_called_fragmented_could_have_held_the_request(
    tried: float, capacity: float, share: float
):
    unallocated = round(share * capacity / 2, 2)
    text = (
        f"CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of "
        f"{capacity:.2f} GiB of which 0.01 GiB is free. Of the allocated memory 1.00 GiB is "
        f"allocated by PyTorch, and {unallocated:.2f} GiB is reserved by PyTorch but unallocated."
    )
    [finding] = diagnose_text(text)
    fragmented = unallocated >= float(f"{tried:.2f}") and unallocated >= 0.05 * capacity
    assert (finding.id == "cuda_oom_fragmented") == fragmented


WITHOUT_NUMBERS = """
RuntimeError: CUDA out of memory
CUDA out of memory
cuda out of memory
CUDA OUT OF MEMORY!
"CUDA out of memory"
2026-03-04 11:02:57 ERROR CUDA out of memory
2026-03-04 11:02:57 CUDA out of memory
2026-03-04T11:02:57.123Z CUDA out of memory
[rank0]: RuntimeError: CUDA out of memory.
Trial 7 failed with RuntimeError('CUDA out of memory')
torch.cuda.OutOfMemoryError: CUDA out of memory.
torch.cuda.OutOfMemoryError
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GB
torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)
torch.OutOfMemoryError: words of another allocator
torch.AcceleratorError: CUDA error: out of memory
RuntimeError: CUDA driver error: out of memory
RuntimeError: cuda runtime error (2) : out of memory at THC/generic/THCStorage.cu:58
RuntimeError: Triton Error [CUDA]: out of memory
RuntimeError: HIP out of memory
RuntimeError: HIP error: out of memory
RuntimeError: XPU out of memory.
"""


@pytest.mark.parametrize("line", WITHOUT_NUMBERS.strip().splitlines())
def test_every_spelling_of_out_of_memory_is_known_and_counted_once(line: str):
    for text in (line, ill(line)):
        [finding] = diagnose_text(text)
        assert finding.id == "cuda_oom"
        assert "times" not in finding.evidence
        assert "training.batch_size" in finding.mend.splitlines()[0]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_with_a_byte_order_mark_is_read(encoding: str, tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text("CUDA out of memory\nstep 4\n", encoding=encoding)
    assert [finding.id for finding in read_log(log)] == ["cuda_oom"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("MemoryError", "host_oom"),
        ("[rank3]: MemoryError", "host_oom"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host_oom"),
        ("Bus error (core dumped)", "shm_full_log"),
        ("run.sh: line 7:  4077 Bus error               python train.py", "shm_full_log"),
        (
            "OutOfResources: out of resource: shared memory, Required: 9, Hardware limit: 8",
            "triton_resources",
        ),
        ("    except MemoryError:", None),
        ("Bus error rates are discussed below", None),
    ],
)
def test_a_line_is_the_sign_of_its_fault_and_of_no_other(line: str, fault: str | None):
    assert [finding.id for finding in diagnose_text(line)] == ([fault] if fault else [])


@pytest.mark.parametrize(
    "line", ["RuntimeError: MPS backend out of memory", "mps backend OUT OF MEMORY"]
)
def test_the_apple_gpu_without_numbers(line: str):
    assert of(diagnose_text(ill(line))) == {"mps_oom"}


def test_numbers_decide_over_words_without_them():
    text = ILL["torch 2.4, much reserved but unallocated"][1]
    for shown in (text, text.lower()):
        assert of(diagnose_text(f"{shown}\nRuntimeError: CUDA out of memory")) == {
            "cuda_oom_fragmented"
        }


def test_how_often_is_counted():
    text = ILL["torch 2.0, plain"][1]
    [finding] = diagnose_text("\n".join([text] * 7))
    assert "7 times" in finding.evidence


# ── advice ────────────────────────────────────────────────────────────────────────────────────


def test_nans_in_fp16_lead_out_of_fp16_and_never_into_it():
    [fp16] = diagnose_text(ILL["NaN in fp16 with transformers"][1])
    [bf16] = diagnose_text(ILL["NaN in bf16"][1])
    assert "device.mixed_precision=bf16" in fp16.mend.splitlines()[0]
    assert "device.mixed_precision=off" in fp16.mend.splitlines()[0]
    assert "training.learning_rate" in bf16.mend.splitlines()[0]
    for pattern in PATTERNS:
        for step in pattern.fault.fix:
            assert not re.search(r"mixed_precision=fp16|amp_dtype=fp16|[Uu]se fp16", step)


def test_what_an_xid_means_is_said_by_its_number():
    [card] = diagnose_text("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.")
    [program] = diagnose_text("NVRM: Xid (PCI:0000:65:00): 31, pid=12, MMU fault")
    assert "fell off the bus" in card.evidence
    assert "Reset the GPU" in card.mend
    assert "CUDA_LAUNCH_BLOCKING" in program.mend
    assert "Reset" not in program.mend


def test_the_version_of_an_old_driver_is_told():
    [finding] = diagnose_text(ILL["driver too old for the wheel"][1])
    assert finding.evidence.endswith("CUDA 11.4")


def test_what_follows_from_a_cause_is_not_said_beside_it():
    oom, child = ILL["torch 2.0, plain"][1], ILL["a child and nothing else"][1]
    assert of(diagnose_text(f"{oom}\n{child}")) == {"cuda_oom"}


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def test_a_log_of_any_size_with_colours_and_bars(tmp_path: Path):
    path = tmp_path / "train.log"
    bar = "\r".join(f"\x1b[32m{n}%\x1b[0m |####| {n}/100 [00:01]" for n in range(100))
    filler = "".join(f"step {n}: loss {random.random():.4f}\n" for n in range(60_000))
    text = ILL["torch 2.4, much reserved but unallocated"][1]
    coloured = text.replace("CUDA out", "\x1b[31mCUDA out")
    path.write_bytes(f"{bar}\n{filler}{coloured}\r\n{filler}".encode() + b"\xff\xfe\x00")
    [finding] = read_log(path)
    assert finding.id == "cuda_oom_fragmented"


def test_a_line_without_end_is_read_too(tmp_path: Path):
    path = tmp_path / "train.log"
    path.write_text("x" * 3_000_000 + " RuntimeError: CUDA error: device-side assert triggered")
    assert of(read_log(path)) == {"device_assert"}


def test_a_log_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot read the log"):
        read_log(tmp_path / "none.log")


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=300))
def test_nothing_that_surrounds_a_message_is_shown(text: str):
    line = text.replace("\n", " ").replace("\r", " ")
    marked = f"{line} qqq{SECRET} CUDA out of memory. Tried to allocate 1.00 GiB. {SECRET}qqq"
    for finding in diagnose_text(marked):
        assert "quabber" not in finding.to_json()
