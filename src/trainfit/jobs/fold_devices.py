"""GPUs that whole folds of a job train on, one each, as `train … --gpus` decides."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainfit.runtime.environment import set_variables

_OTHERS = "TRAINFIT_FOLD_GPUS"
"""Names of the GPUs besides the first, which this process trains on."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def give_folds(names: Sequence[str]) -> None:
    """Set the variables for folds on several GPUs: the first for this process, others for more."""
    set_variables({_VISIBLE: names[0], _OTHERS: ",".join(names[1:])})


def other_gpus() -> list[dict[str, str]]:
    """Variables of a process on each of the other GPUs; empty where there are none."""
    named = os.environ.get(_OTHERS, "")
    return [{_VISIBLE: name, _OTHERS: ""} for name in named.split(",") if name]
