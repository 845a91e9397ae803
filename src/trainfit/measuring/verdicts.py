"""Requested against observed, one function for each optimization: what the receipt says of it.

A verdict takes what was asked for (None where that is not known) and the evidence of a step.
"""

from __future__ import annotations

from collections.abc import Callable

from trainfit.core.records import ReceiptItem, Scalar
from trainfit.measuring.trace import AttentionSeen, Evidence

Verdict = Callable[[Scalar, Evidence], ReceiptItem]
_HALF = ("bf16", "fp16")
_OFF = (None, False, "off", "none", "fp32", 0)
_FP32_SHARE = 0.01
"""Least share of fp32 products for exact kernels to count as evidence against TF32."""
_FUSED = ("fused", "compiled", "own")
_HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch with a fused kernel."""


def judged(
    name: str,
    requested: Scalar,
    observed: Scalar,
    evidence: str,
    *,
    right: bool | None = None,
    mend: str = "",
) -> ReceiptItem:
    """An item: not active where something was asked for and what was seen is not `right`."""
    on = observed not in _OFF
    kept = (requested == observed) if right is None else right
    status = "not_active" if requested not in _OFF and not kept else "active" if on else "off"
    return ReceiptItem(
        name=name,
        requested=requested,
        observed=observed,
        status=status,  # type: ignore[arg-type]
        evidence=evidence,
        mend=mend if status == "not_active" else "",
    )


def inapplicable(name: str, requested: Scalar, why: str) -> ReceiptItem:
    """An item that has no place in this run."""
    return ReceiptItem(
        name=name, requested=requested, observed=None, status="not_applicable", evidence=why
    )


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────


def mixed_precision(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the dtype of the matrix products."""
    products = seen.products
    if products.dtype is None:
        return inapplicable("mixed_precision", requested, "no matrix product was seen in the step")
    shares = ", ".join(f"{share:.0%} {name}" for name, share in _by_share(products.shares))
    kernel = f"; longest kernel {products.kernels[0]}" if products.kernels else ""
    evidence = f"matrix products by operations: {shares}{kernel}"
    observed = products.dtype if products.dtype in _HALF else "off"
    right = requested == observed or (requested is True and observed != "off")
    if right or requested in _OFF:
        return judged("mixed_precision", requested, observed, evidence, right=right)
    cause, mend = _no_half(requested, seen)
    evidence = f"{evidence}; {cause}"
    return judged("mixed_precision", requested, observed, evidence, right=False, mend=mend)


def _no_half(requested: Scalar, seen: Evidence) -> tuple[str, str]:
    """Why the products were not in the dtype that was asked for, and what to do."""
    if seen.products.dtype in _HALF:
        return f"that is not {requested}", f"give autocast the dtype of {requested}"
    if seen.products.casts:
        return (
            "some tensors were cast, so autocast is off around most of the model",
            "keep the whole forward pass inside torch.autocast",
        )
    return (
        "no tensor was cast: autocast was off in the forward pass",
        "run forward and loss under torch.autocast, with the type of the device in use",
    )


def _by_share(shares: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda pair: -pair[1])


def tf32(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the names of the kernels; by torch's switch where no kernel tells."""
    if seen.device != "cuda":
        return inapplicable("tf32", requested, "it is a mode of NVIDIA GPUs")
    products, switch = seen.products, seen.switches.tf32
    share = products.shares.get("fp32", 0.0)
    # cuBLAS multiplies small matrices exactly, such as those of a classifier's head.
    exact = products.exact_kernels if share >= _FP32_SHARE else 0
    if products.tf32_kernels or exact:
        observed = products.tf32_kernels > 0
        evidence = (
            f"{products.tf32_kernels} products in TF32 kernels, {products.exact_kernels} exact"
        )
    else:
        observed = bool(switch)
        evidence = f"torch's switch reads {switch}; {share:.0%} of the products are in fp32"
    mend = "torch.backends.cuda.matmul.fp32_precision = 'tf32', or device.tf32=true"
    return judged("tf32", requested, observed, evidence, mend=mend)


def fused_optimizer(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """Judge by the operators that updated the weights."""
    if not seen.updates:
        return inapplicable("fused_optimizer", requested, "no optimizer step was seen")
    calls = ", ".join(f"{count} {kind}" for kind, count in seen.updates.items())
    names = ", ".join(f"{name} ({kind})" for name, kind in seen.optimizers.items())
    evidence = f"calls that updated the weights: {calls}" + (f", by {names}" if names else "")
    able = [kind for name, kind in seen.optimizers.items() if name in _HAVE_FUSED]
    observed = all(kind in _FUSED for kind in able or seen.updates)
    if not observed:
        evidence += "; the fused kernel was not called"
    fix = (
        "build AdamW with fused=True; it takes floating-point weights of one device, "
        "so look for a fallback that was taken silently"
    )
    return judged("fused_optimizer", requested, observed, evidence, mend=fix)


# ── attention ─────────────────────────────────────────────────────────────────────────────────

_SDPA = ("flash", "efficient", "cudnn", "math", "cpu")
_OWN = {
    "disentangled": "the model has attention of its own",
    "softcapped": "the model caps its logits, which the flash kernel does not do",
}
_LARGEST_HEAD = 256


def attention(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the kernel that was called most."""
    found = seen.attention
    if found.kernel is None and not found.softmaxes:
        return inapplicable("attention", requested, "no attention was computed in the step")
    observed = found.kernel or "eager"
    calls = ", ".join(f"{count} {kernel}" for kernel, count in found.calls.items())
    evidence = f"calls: {calls}" if calls else f"{found.softmaxes} softmaxes and no kernel"
    if found.masked:
        evidence += ", with a mask"
    right = {"sdpa": observed in _SDPA, "own": True, "flash": _is_flash(found)}.get(
        str(requested), requested == observed
    )
    mend = "see flash_attention" if requested == "flash" else _path_mend(str(requested))
    return judged("attention", requested, observed, evidence, right=right, mend=mend)


def _path_mend(requested: str) -> str:
    return {
        "sdpa": "build the model with attn_implementation='sdpa'",
        "varlen": "packed rows in half precision on compute capability 8.0 or newer, no dropout",
        "disentangled": "packed rows on a GPU with Triton, no attention dropout",
        "softcapped": "packed rows on a GPU with Triton, no attention dropout",
    }.get(requested, f"build the model with attn_implementation={requested!r}")


def flash_attention(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the kernel, and what kept it from running."""
    found = seen.attention
    if seen.device != "cuda":
        return inapplicable("flash_attention", requested, "its kernel is for GPUs")
    if found.kernel is None or found.kernel in _OWN:
        why = _OWN.get(found.kernel or "", "no attention kernel ran")
        return inapplicable("flash_attention", requested, why)
    observed = _is_flash(found)
    cause, mend = _no_flash(seen)
    evidence = f"the {found.kernel} kernel ran" + ("" if observed else f": {cause}")
    return judged("flash_attention", requested, observed, evidence, mend=mend)


def _is_flash(found: AttentionSeen) -> bool:
    """Or cuDNN's, which torch prefers on newer GPUs: with a mask, that one reads it all."""
    return found.kernel in ("flash", "varlen") or (found.kernel == "cudnn" and not found.masked)


def _no_flash(seen: Evidence) -> tuple[str, str]:
    found = seen.attention
    if found.masked:
        return "a mask was passed, which the flash kernel does not take", (
            "pack sequences (training on packed rows needs no mask), or pass is_causal"
        )
    if found.dtype not in _HALF:
        return f"it was given {found.dtype}, and takes half precision", "mixed precision"
    if found.head is not None and found.head > _LARGEST_HEAD:
        return f"heads of {found.head} are too large for it", "a model with smaller heads"
    if seen.switches.flash is False:
        return "torch's switch for it is off", "torch.backends.cuda.enable_flash_sdp(True)"
    return "torch chose another", "see torch.backends.cuda.can_use_flash_attention"


# ── the compiler ──────────────────────────────────────────────────────────────────────────────


def compiled(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By the compiled pieces that ran, and whether they were pieces of what was asked."""
    found = seen.compiler
    evidence = (
        f"{found.regions} compiled regions ran in the step; "
        f"{found.graphs} graphs, {found.recompiles} recompiles"
    )
    mend = ""
    if not found.regions:
        cause = found.failures[0] if found.failures else None
        evidence += f"; the compiler failed ({cause})" if cause else "; nothing compiled was called"
        mend = (
            "trainfit doctor says what the compiler lacks; else compile the module that is called"
        )
    elif found.resumed:
        reason = found.breaks[0] if found.breaks else "no reason was kept"
        evidence += f"; {found.resumed} of them go on after a graph break: {reason}"
        mend = "TORCH_LOGS=graph_breaks shows where; take what breaks the graph out of the model"
    whole = bool(found.regions) and not found.resumed
    observed: Scalar = "in pieces" if found.resumed else bool(found.regions)
    return judged("compile", requested, observed, evidence, right=whole, mend=mend)


def liger(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By its kernels."""
    if seen.device != "cuda":
        return inapplicable("liger", requested, "its kernels are for GPUs")
    evidence = f"{seen.liger} launches of its kernels in the step"
    mend = "pip install liger-kernel; it has layers for the Gemma, Llama, Mistral and Qwen families"
    return judged("liger", requested, seen.liger > 0, evidence, mend=mend)


def cuda_graphs(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By their launches."""
    if seen.device != "cuda":
        return inapplicable("cuda_graphs", requested, "they belong to GPUs")
    launches = seen.compiler.graph_launches
    mend = "keep shapes fixed and inputs on the GPU; TORCH_LOGS=cudagraphs says what stands against"
    return judged(
        "cuda_graphs", requested, launches > 0, f"{launches} launches in the step", mend=mend
    )


def checkpointing(requested: Scalar, seen: Evidence) -> ReceiptItem:
    """By what of the forward pass ran again in the backward pass."""
    again = seen.recomputed
    evidence = f"{again} operators of the forward pass ran in the backward pass"
    mend = "model.gradient_checkpointing_enable(), with the model in training mode"
    return judged(
        "gradient_checkpointing", requested, again > 0, evidence, right=again > 0, mend=mend
    )


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
