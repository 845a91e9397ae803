"""AdamW whose moments take fewer bytes than float32: bfloat16, or one byte and a scale per block.

The weights stay in float32. `kernels.small_adamw` makes the updates.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainfit.core.errors import BadInput
from trainfit.engine.fsdp import local
from trainfit.kernels.small_adamw import BLOCK, LEAST, adamw_8bit_, adamw_bf16_

Moments = Literal["bf16", "8bit"]
SMALL: dict[str, Moments] = {"adamw_bf16": "bf16", "adamw_8bit": "8bit"}
"""Moments by the optimizer's name in a configuration."""
CODES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
"""State of a weight whose moments are codes."""


class Piece(NamedTuple):
    """A weight of this rank, or a part of it, with all that its update reads and writes."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    number: int
    """Place of the weight among all that are trained."""
    start: int = 0
    """First element of the part."""


class SmallAdamW(torch.optim.Optimizer):
    """AdamW with small moments; the engine's `update_once` calls its kernels."""

    def __init__(self, groups: list[dict[str, Any]], moments: Moments, **options: Any) -> None:
        """Take torch's groups and AdamW's lr, betas and eps."""
        super().__init__(groups, {"weight_decay": 0.0, "fused": True, "moments": moments} | options)
        odd = {p.dtype for group in self.param_groups for p in group["params"]} - {torch.float32}
        if odd:
            raise BadInput(
                f"the small moments of AdamW are for float32 weights, not {odd.pop()}",
                "set optimization.optimizer=adamw_fused",
            )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all weights that have a gradient."""
        from trainfit.engine.updates import update_once

        update_once(self, torch.ones((), dtype=torch.bool, device=_device(self)))


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    found: Tensor = optimizer.param_groups[0]["params"][0]
    return found.device


def small_moments(parameter: Tensor, moments: Moments) -> dict[str, Tensor]:
    """Make the moments of a weight, all zero; in its own layout, sharded where it is."""
    small = local(parameter).numel() < LEAST
    if moments == "bf16" or small:
        dtype = torch.float32 if moments == "8bit" else torch.bfloat16
        return {
            name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")
        }
    blocks = -(-parameter.numel() // BLOCK)
    made = [
        torch.zeros(blocks, device=parameter.device)
        if name.endswith("_scale")
        else torch.zeros_like(parameter, dtype=torch.uint8)
        for name in CODES
    ]
    return dict(zip(CODES, made, strict=True))


def launch(
    pieces: list[Piece], counts: list[Tensor], group: dict[str, Any], found_inf: Tensor
) -> None:
    """Update pieces of one group by a fused kernel; `counts` are their steps with this one."""
    beta1, beta2 = group["betas"]
    weights, gradients, states, numbers, starts = map(list, zip(*pieces, strict=True))
    if group.get("moments") is None:
        torch._fused_adamw_(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts,
            found_inf=found_inf,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
        )
        return
    rate = group["lr"]
    if not isinstance(rate, Tensor):
        rate = torch.full((), rate, device=found_inf.device)
    taken = (torch.stack(counts), rate, found_inf)
    fixed = (beta1, beta2, group["eps"], group["weight_decay"])
    if "exp_avg_scale" in states[0]:
        moments = [[state[name] for state in states] for name in CODES]
        adamw_8bit_(weights, gradients, *moments, *taken, *fixed)
    else:
        moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
        adamw_bf16_(weights, gradients, *moments, numbers, starts, *taken, *fixed)
