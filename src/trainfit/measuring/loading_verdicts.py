"""Verdicts on the batch, the loader and the rest of the process."""

from __future__ import annotations

from trainfit.measuring.evidence import Evidence
from trainfit.measuring.verdicts import inapplicable, judged
from trainfit.records import ReceiptItem, Scalar


def packing(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the batches themselves."""
    batches = seen.batches
    if batches.packed is None:
        return inapplicable("packing", requested, "the batches have no padding to do without")
    evidence = "rows end to end" if batches.packed else "a row for each sequence"
    if batches.padding_share is not None:
        evidence += f", {batches.padding_share:.1%} of the tokens are padding"
    mend = "give the model packed rows with cu_seqlens"
    return judged("packing", requested, batches.packed, evidence, mend=mend)


def effective_batch(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the sequences of the step."""
    count = seen.batches.sequences
    if count is None:
        return inapplicable("effective_batch", requested, "the batches do not say how many")
    mend = "accumulate until all sequences of a step are in, uneven cuts too"
    return judged("effective_batch", requested, count, f"{count} sequences in the step", mend=mend)


def accumulation(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the micro-batches of the step: how many are needed is not a matter of wishes."""
    count = seen.batches.micro_batches
    if count is None:
        return inapplicable("gradient_accumulation", requested, "no batch was seen")
    on = count > 1
    return ReceiptItem(
        name="gradient_accumulation",
        requested=requested,
        observed=count,
        status="active" if on else "off",
        evidence=f"{count} micro-batches in the step" if on else "the step was taken in one piece",
    )


def clipping(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By its arithmetic."""
    evidence = "gradients were multiplied by a factor bounded by their norm"
    if not seen.clipped:
        evidence = "no norm was followed by a product with all gradients"
    mend = "torch.nn.utils.clip_grad_norm_ before optimizer.step()"
    return judged("gradient_clipping", requested, seen.clipped, evidence, mend=mend)


def set_to_none(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By what zero_grad did."""
    if seen.zeroed is None:
        return inapplicable("set_to_none", requested, "zero_grad was not called in the step")
    evidence = "zero_grad filled gradients with zeros" if seen.zeroed else "zero_grad let them go"
    mend = "optimizer.zero_grad(set_to_none=True)"
    return judged("set_to_none", requested, not seen.zeroed, evidence, mend=mend)


def workers(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the processes that are alive, and whether anybody waited for them."""
    batches = seen.batches
    evidence = f"{batches.workers} loader processes alive"
    if batches.waited_share is not None:
        evidence += f", {batches.waited_share:.1%} of the time spent waiting for data"
    cause = "; batches are made in the training process" if not batches.workers else ""
    mend = "DataLoader(num_workers=…), training.num_workers here; see that none has died"
    right = not isinstance(requested, int) or batches.workers >= requested
    return judged("workers", requested, batches.workers, evidence + cause, right=right, mend=mend)


def pinned_memory(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the tensors, and by the kind of copy that the GPU made."""
    batches = seen.batches
    if seen.device != "cuda":
        return inapplicable("pinned_memory", requested, "nothing is copied to a GPU")
    if batches.tensors:
        observed = batches.pinned == batches.tensors
        evidence = f"{batches.pinned} of {batches.tensors} tensors of the batches are pinned"
    elif batches.pinned_bytes or batches.pageable_bytes:
        observed = batches.pinned_bytes >= batches.pageable_bytes
        evidence = "no batch was seen"
    else:
        return inapplicable("pinned_memory", requested, "no batch came from the host")
    evidence += (
        f"; copied to the GPU: {batches.pinned_bytes:,} bytes from pinned memory, "
        f"{batches.pageable_bytes:,} from pageable"
    )
    mend = (
        "DataLoader(pin_memory=True), and copy the tensors that it gives, not others made of them"
    )
    return judged("pinned_memory", requested, observed, evidence, mend=mend)


def cudnn_benchmark(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By torch's switch, where a convolution gives it something to choose."""
    if seen.device != "cuda":
        return inapplicable("cudnn_benchmark", requested, "cuDNN is for GPUs")
    on = seen.switches.cudnn_benchmark
    if not seen.convolutions and (on or not requested):
        return inapplicable(
            "cudnn_benchmark", requested, f"no convolution ran; torch's switch reads {on}"
        )
    evidence = f"torch's switch reads {on}; {seen.convolutions} convolutions ran"
    mend = "torch.backends.cudnn.benchmark = True; deterministic algorithms turn it off"
    return judged("cudnn_benchmark", requested, on, evidence, mend=mend)


def channels_last(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """For convolutions alone."""
    if not seen.convolutions:
        why = "no convolution ran: it is a layout of images, not of text"
        return inapplicable("channels_last", requested, why)
    return inapplicable("channels_last", requested, "the layout of images is not looked at")


def expandable_segments(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By what the allocator says of itself."""
    if seen.device != "cuda" or "expandable_segments" not in seen.switches.allocator:
        why = "this process has no caching allocator of CUDA that tells"
        return inapplicable("expandable_segments", requested, why)
    on = bool(seen.switches.allocator["expandable_segments"])
    mend = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts"
    return judged("expandable_segments", requested, on, f"the allocator says {on}", mend=mend)


def deterministic(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By torch's switch."""
    on = seen.switches.deterministic
    mend = "torch.use_deterministic_algorithms(True)"
    return judged("deterministic", requested, on, f"torch's switch reads {on}", mend=mend)
