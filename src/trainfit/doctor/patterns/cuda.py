"""The driver, the CUDA libraries and the GPU itself."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.doctor.finding import Fault, Seen
from trainfit.doctor.patterns.pattern import Context, Pattern, Sign, quote

_XIDS = {
    13: "a kernel of the program went wrong",
    31: "a kernel read or wrote where it may not",
    43: "the program on it was stopped after a fault of its own",
    45: "work was cancelled after an earlier error",
    48: "memory failed beyond repair (double-bit ECC)",
    61: "the GPU's own controller failed",
    62: "the GPU's own controller failed",
    63: "a memory page or row was retired",
    64: "a memory page or row could not be retired",
    74: "NVLink failed",
    79: "the GPU fell off the bus",
    92: "memory had many errors that were corrected",
    94: "memory failed, and one program with it",
    95: "memory failed, and the GPU must be reset",
    119: "the GPU's controller does not answer",
    120: "the GPU's controller failed",
}
_LOST = 79
_PROGRAM_XIDS = {13, 31, 43, 45}
_FIND_KERNEL = "`export CUDA_LAUNCH_BLOCKING=1` for one run names the operation that failed."


_PROGRAM_STEPS = (
    _FIND_KERNEL,
    "optimization.compile=false, to see whether it is a compiled kernel.",
)


def _xid(signs: Sequence[Sign], _context: Context) -> Seen | None:
    number = int(signs[0].groups.get("number") or _LOST)
    meaning = _XIDS.get(number, "see NVIDIA's list of Xid errors")
    return Seen(
        evidence=f"{quote(signs)}: {meaning}",
        mend=_PROGRAM_STEPS if number in _PROGRAM_XIDS else None,
    )


def _driver(signs: Sequence[Sign], _context: Context) -> Seen | None:
    versions = [found for sign in signs if (found := sign.groups.get("found"))]
    if not versions:
        return Seen(evidence=quote(signs))
    number = int(versions[0])
    return Seen(evidence=f"{quote(signs)}: CUDA {number // 1000}.{number % 1000 // 10}")


_XID = Fault(
    id="xid",
    severity="error",
    title="The driver reported an error of the GPU (Xid)",
    why="The number says whether the program, the memory, the link or the card failed.",
    mend=(
        "`nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER` and `dmesg | grep -i xid` say more.",
        "Reset the GPU (`sudo nvidia-smi --gpu-reset -i 0`) or restart the machine.",
        "Go on from the last checkpoint with `trainfit train nli --resume RUN`.",
        "If it comes back, check power and seating, and have the card replaced.",
    ),
)

PATTERNS = (
    Pattern(
        fault=Fault(
            id="driver_too_old",
            severity="error",
            title="The NVIDIA driver is too old for this torch",
            why="torch's CUDA needs a driver of its own major version, so there is no GPU at all.",
            mend=(
                "`nvidia-smi` (CUDA Version) against "
                '`python -c "import torch; print(torch.version.cuda)"`.',
                "Update the driver: 525 or newer for CUDA 12, 580 or newer for CUDA 13.",
                "Or install a torch for the older CUDA: "
                "`pip install torch --index-url https://download.pytorch.org/whl/cu126`.",
            ),
        ),
        like="The NVIDIA driver on your system is too old (found version 11040)",
        signs=(
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"The NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"NVIDIA driver version is insufficient",
            r"provided PTX was compiled with an unsupported toolchain",
        ),
        explain=_driver,
    ),
    Pattern(
        fault=Fault(
            id="driver_mismatch",
            severity="error",
            title="The driver was updated under a running system",
            why="The kernel's part and the library no longer fit together.",
            mend=("Restart the machine, or reload the nvidia kernel modules.",),
        ),
        like="Failed to initialize NVML: Driver/library version mismatch",
        signs=(r"Failed to initialize NVML: Driver/library version mismatch",),
    ),
    Pattern(
        fault=Fault(
            id="no_gpu_found",
            severity="error",
            title="The program found no GPU",
            why="The driver is missing or not passed on, or every GPU is hidden.",
            mend=(
                "`nvidia-smi` must list the GPU; if not, install the driver, or start the "
                "container with `docker run --gpus all`.",
                "`echo $CUDA_VISIBLE_DEVICES` must not be empty or wrong.",
                "`trainfit doctor` on that machine says which it is.",
            ),
        ),
        like="ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        signs=(
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver on your system",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"no CUDA-capable device is detected",
            r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",
            r"CUDA unknown error - this may be due to an incorrectly set up environment",
        ),
    ),
    Pattern(
        fault=Fault(
            id="cpu_build",
            severity="error",
            title="torch was built without CUDA",
            why="This build cannot use any GPU.",
            mend=(
                "Install the CUDA build: "
                "`pip install torch --index-url https://download.pytorch.org/whl/cu130`.",
                "device.use_cuda=auto trains on what there is.",
            ),
        ),
        like="Torch not compiled with CUDA enabled",
        signs=(r"Torch not compiled with CUDA enabled",),
    ),
    Pattern(
        fault=Fault(
            id="invalid_device",
            severity="error",
            title="A GPU was asked for that is not there",
            why="More ranks than GPUs, or a number beyond what CUDA_VISIBLE_DEVICES leaves.",
            mend=(
                "`torchrun --nproc-per-node` must not be more than `nvidia-smi -L | wc -l`.",
                "`unset CUDA_VISIBLE_DEVICES`, or list every GPU that is used.",
            ),
        ),
        like="CUDA error: invalid device ordinal",
        signs=(r"CUDA error: invalid device ordinal",),
    ),
    Pattern(
        fault=Fault(
            id="no_kernel_image",
            severity="error",
            title="torch has no kernels for this GPU",
            why="The GPU is newer or older than the architectures that this build was made for.",
            mend=(
                '`python -c "import torch; print(torch.cuda.get_arch_list())"` lists them.',
                "A new GPU: the newest torch, "
                "`pip install -U torch --index-url https://download.pytorch.org/whl/cu130`.",
                "A GPU before compute capability 7.5: "
                "`pip install torch --index-url https://download.pytorch.org/whl/cu126`.",
            ),
        ),
        like="CUDA error: no kernel image is available for execution on the device",
        signs=(
            r"no kernel image is available for execution on the device",
            r"with CUDA capability sm_\d+a? is not compatible with the current PyTorch "
            r"installation",
        ),
    ),
    Pattern(
        fault=Fault(
            id="device_assert",
            severity="error",
            title="An index was out of range on the GPU",
            why="Most often a label beyond the number of classes, or a token beyond the "
            "vocabulary. After it every CUDA call of the process fails.",
            mend=(
                _FIND_KERNEL,
                "One step on the CPU gives the plain error: device.use_cuda=false "
                "training.max_steps=1.",
                "Compare the largest label with the number of classes, and the largest token with "
                "the model's vocabulary.",
            ),
        ),
        like="CUDA error: device-side assert triggered",
        signs=(
            r"CUDA error: device-side assert triggered",
            r"Assertion `[\w <>=&|!.()\[\]-]{1,80}` failed",
        ),
    ),
    Pattern(
        fault=Fault(
            id="illegal_access",
            severity="error",
            title="A kernel read or wrote where it may not",
            why="A faulty kernel, rarely a faulty GPU. The operation named is often a later one.",
            mend=(
                _FIND_KERNEL,
                "optimization.compile=false, then model.use_flash_attention=false, to see whose "
                "kernel it is.",
                "Update the driver and torch; `compute-sanitizer python …` finds the very line.",
            ),
        ),
        like="CUDA error: an illegal memory access was encountered",
        signs=(r"an illegal memory access was encountered", r"CUDA error: misaligned address"),
    ),
    Pattern(
        fault=_XID,
        like="NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus",
        signs=(
            r"NVRM: Xid \(PCI:[\da-f:.]+\): (?P<number>\d+)",
            r"GPU has fallen off the bus",
            r"GPU is lost\.  Reboot the system",
        ),
        explain=_xid,
    ),
    Pattern(
        fault=Fault(
            id="ecc",
            severity="error",
            title="The GPU's memory failed",
            why="Results on it cannot be trusted until it is reset.",
            mend=_XID.mend,
        ),
        like="CUDA error: uncorrectable ECC error encountered",
        signs=(r"uncorrectable ECC error encountered", r"uncorrectable NVLink error"),
    ),
    Pattern(
        fault=Fault(
            id="library_mismatch",
            severity="error",
            title="CUDA libraries of different versions are mixed",
            why="Another CUDA or cuDNN is found before the one that torch brings.",
            mend=(
                "`unset LD_LIBRARY_PATH` and try again.",
                "Install torch anew in a clean environment, without a CUDA of its own beside it.",
            ),
        ),
        like="libcudart.so.12: cannot open shared object file",
        signs=(
            r"libcu\w+\.so[.\d]*: cannot open shared object file",
            r"undefined symbol: __nvJitLink\w+",
            r"CUDNN_STATUS_SUBLIBRARY_\w+",
            r"Unable to load any of \{libcudnn\w*",
            r"CUDNN_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED)",
        ),
    ),
    Pattern(
        fault=Fault(
            id="cuda_in_fork",
            severity="error",
            title="CUDA was used in a forked process",
            why="A process that has started CUDA cannot be copied.",
            mend=(
                "Keep tensors of loader workers on the CPU.",
                "training.num_workers=0, or multiprocessing's start method spawn.",
            ),
        ),
        like="Cannot re-initialize CUDA in forked subprocess",
        signs=(r"Cannot re-initialize CUDA in forked subprocess",),
    ),
)
