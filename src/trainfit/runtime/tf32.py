"""TF32 on or off, so that every reader of the setting sees the same.

torch keeps it twice: in the old flags (`allow_tf32`, `set_float32_matmul_precision`), and in the
newer tree of `fp32_precision` (everything, then CUDA, then matmul, conv and rnn, where "none"
follows the level above). The old setters write both. The new ones write the tree alone, and from
then on the old getters raise, also where Inductor or another library calls them. So the old
setters go first, and then the tree is pinned where they leave it open. After that the old getters,
the new ones and torch.compile all agree, whichever of the two the program had used before.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from trainfit.records import Change

_LEVEL = "fp32_precision"


def tf32(on: bool, restore: ExitStack) -> Change:
    """Let float32 matrix products and convolutions run in TF32 on the GPUs that have it."""
    before = _reads()
    _write_matmul(on, restore)
    _write_cudnn(on, restore)
    return Change(name="tf32", requested=on, before=before, after=_reads())


def _reads() -> bool | str:
    """Whether TF32 is on, or for what alone it is."""
    import torch

    cudnn: Any = torch.backends.cudnn
    parts = {"matmul": torch.backends.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}
    on = [name for name, part in parts.items() if part.fp32_precision == "tf32"]
    return bool(on) if len(on) in (0, len(parts)) else f"{' and '.join(on)} only"


def _write_matmul(on: bool, restore: ExitStack) -> None:
    import torch

    backends: Any = torch.backends
    above = {backends.cuda.matmul: (backends, backends.cudnn), backends.mkldnn.matmul: (backends,)}
    for part, levels in above.items():
        restore.callback(setattr, part, _LEVEL, _own(part, *levels))
    for part in above:
        part.fp32_precision = "ieee"  # now nothing contradicts the old flag, and it can be read
    restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    # Not by way of set_float32_matmul_precision: its "medium" allows TF32 too, and its "high" would
    # also lower the CPU's part, which stays exact here.
    backends.cuda.matmul.allow_tf32 = on


def _write_cudnn(on: bool, restore: ExitStack) -> None:
    import torch

    backends: Any = torch.backends
    cudnn = backends.cudnn
    value = "tf32" if on else "ieee"
    flag = _cudnn_flag()
    own = {part: _own(part, backends, cudnn) for part in (cudnn.conv, cudnn.rnn)}
    # The old setter's off is "none" for conv and rnn, which follows this level. Inductor's
    # convolutions ask it too.
    restore.callback(setattr, cudnn, _LEVEL, _own(cudnn, backends))
    cudnn.fp32_precision = value
    # conv and rnn begin with a default that no setter can bring back (TF32, unless a level above
    # says otherwise), so they are written only where they stand wrong.
    if flag == on and all(part.fp32_precision == value for part in own):
        return
    for part, before in own.items():
        restore.callback(setattr, part, _LEVEL, before)
    restore.callback(setattr, cudnn, "allow_tf32", flag)
    cudnn.allow_tf32 = on


def _cudnn_flag() -> bool:
    """The old flag of cuDNN, also where it contradicts the tree."""
    import torch

    cudnn: Any = torch.backends.cudnn
    try:
        return bool(cudnn.allow_tf32)
    except RuntimeError:  # torch's answer where the flag is not what conv and rnn say
        return bool(cudnn.conv.fp32_precision != "tf32")


def _own(part: Any, *above: Any) -> str:
    """What `part` of the tree holds itself; "none" where it follows the levels `above`."""
    seen = part.fp32_precision
    with ExitStack() as probe:
        for level in above:
            probe.callback(setattr, level, _LEVEL, level.fp32_precision)
            level.fp32_precision = "none"
        own = part.fp32_precision
    return str(own) if own == seen else "none"
