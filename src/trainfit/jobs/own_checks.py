"""Checks of what the methods of a job of the user's own give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainfit.core.errors import BadInput, brief
from trainfit.engine.optimizer import Combined, check_usable
from trainfit.jobs.registry import Job


def check_number(name: str, value: Any) -> float:
    """Return a figure of evaluate, or raise BadInput where it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"evaluate gives {brief(str(value), 60)!r} for {name}"
        raise BadInput(what, "give a number") from None


def check_model(job: Job) -> nn.Module:
    """Return a new model of a job, or raise BadInput for anything else."""
    found: Any = job.model()
    if not isinstance(found, nn.Module):
        raise BadInput(
            f"{type(job).__name__}.model gives a {type(found).__name__}", "give a Module"
        )
    return found


def check_optimizer(found: Any, job: Job) -> torch.optim.Optimizer:
    """Return what a job's optimizer gives, or raise BadInput where the loop cannot step it."""
    name = f"{type(job).__name__}.optimizer"
    if isinstance(found, list | tuple) and found:  # one for each part of the model, as of a GAN
        return Combined(*(check_optimizer(one, job) for one in found))
    if not isinstance(found, torch.optim.Optimizer):
        raise BadInput(f"{name} gives a {type(found).__name__}", "give a torch.optim.Optimizer")
    if isinstance(found, torch.optim.LBFGS):
        raise BadInput(f"{name} gives LBFGS, which needs a closure", "give another optimizer")
    check_usable(found)
    return found


def check_loss(losses: Any, indivisible: bool) -> Tensor:
    """Return what a job's loss gives, or raise BadInput where it is not one number per sample."""
    if not isinstance(losses, Tensor):
        raise BadInput(f"loss gives a {type(losses).__name__}", "return a tensor, one per sample")
    if losses.dim() == 0 and not indivisible:
        raise BadInput(
            "loss gives one number for the whole batch",
            'give one per sample (reduction="none"), or set indivisible = True',
        )
    if not losses.requires_grad and torch.is_grad_enabled():
        raise BadInput("loss depends on no weight", "leave out detach() and no_grad()")
    return losses


def summed(given: Any, counted: Tensor, indivisible: bool) -> Tensor:
    """Sum one loss per sample over those that count."""
    losses = check_loss(given, indivisible)
    if indivisible:
        return losses.sum() if losses.dim() == 0 else losses.mean()
    if len(losses) != len(counted):
        raise BadInput(
            f"loss gives {len(losses):,} values for {len(counted):,} samples",
            "give one per sample: the first dimension is that of the batch",
        )
    losses = losses.reshape(len(losses), -1).mean(1)
    return losses.where(counted.to(losses.device), 0.0).sum()
