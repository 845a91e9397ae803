"""Verdicts of the receipt: requested against observed, one function for each optimization.

A verdict takes the requested value (None where it is unknown) and the evidence of a step. It
returns a judgement, or the reason why the optimization cannot apply to the run.
"""

from __future__ import annotations

from trainfit.core.records import ReceiptItem, Scalar
from trainfit.measuring.kernel_verdicts import (
    Judgement,
    ReceiptRule,
    attention,
    attention_dropout,
    flash_attention,
    fused_optimizer,
    offload,
    optimizer,
)
from trainfit.measuring.trace import Evidence

_HALF = ("bf16", "fp16")
_OFF = (None, False, "off", "none", "fp32", 0)
_FP32_SHARE = 0.01
"""Least share of fp32 products for exact kernels to count as evidence against TF32."""
ON_GPU = "data on the GPU"  # requested in place of loader processes


def judge(name: str, requested: Scalar, seen: Evidence) -> ReceiptItem:
    """Make the receipt's item: not active where something was requested and is not so."""
    verdict = VERDICTS[name]
    elsewhere = verdict.elsewhere if seen.device != "cuda" else ""
    found = elsewhere or verdict.judge(requested, seen)
    if isinstance(found, str):
        return ReceiptItem(
            name=name, requested=requested, observed=None, status="not_applicable", evidence=found
        )
    right = requested == found.observed if found.right is None else found.right
    failed = requested not in _OFF and not right
    on = found.observed not in _OFF if found.on is None else found.on
    return ReceiptItem(
        name=name,
        requested=requested,
        observed=found.observed,
        status="not_active" if failed else "active" if on else "off",
        evidence=found.evidence,
        mend=found.fix if failed else "",
    )


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────


def mixed_precision(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the dtype of the matrix products."""
    products = seen.products
    if products.dtype is None:
        return "no matrix product was seen in the step"
    most_first = sorted(products.shares.items(), key=lambda pair: -pair[1])
    shares = ", ".join(f"{share:.0%} {name}" for name, share in most_first)
    kernel = f"; longest kernel {products.kernels[0]}" if products.kernels else ""
    evidence = f"matrix products by operations: {shares}{kernel}"
    observed = products.dtype if products.dtype in _HALF else "off"
    right = requested == observed or (requested is True and observed != "off")
    if right or requested in _OFF:
        return Judgement(observed, evidence, right=right)
    cause, fix = _no_half(requested, seen)
    return Judgement(observed, f"{evidence}; {cause}", fix)


def _no_half(requested: Scalar, seen: Evidence) -> tuple[str, str]:
    """Reason that the products were not in the requested dtype, and the fix."""
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


def quantization(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the dtype of the codes that products of the step were made with."""
    found = seen.quantized
    if not found.products and not seen.attention.calls and not seen.attention.softmaxes:
        return "no block of a model ran in the step; a frozen encoder runs before it"
    counts = ", ".join(f"{count} with {kind}" for kind, count in found.products.items()) or "none"
    evidence = f"matrix products by the codes of their weights: {counts}; {found.nbytes:,} bytes"
    observed = max(found.products, key=lambda kind: found.products[kind], default="none")
    return Judgement(observed, evidence, f"build the model with model.quantization={requested}")


def tf32(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the names of the kernels; by torch's switch where no kernel tells."""
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
    fix = "torch.backends.cuda.matmul.fp32_precision = 'tf32', or device.tf32=true"
    return Judgement(observed, evidence, fix)


# ── the compiler ──────────────────────────────────────────────────────────────────────────────


def compiled(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the compiled pieces that ran, and whether they were pieces of what was asked."""
    found = seen.compiler
    evidence = (
        f"{found.regions} compiled regions ran in the step; "
        f"{found.graphs} graphs, {found.recompiles} recompiles"
    )
    fix = ""
    if not found.regions:
        cause = found.failures[0] if found.failures else None
        evidence += f"; the compiler failed ({cause})" if cause else "; nothing compiled was called"
        fix = "trainfit doctor says what the compiler lacks; else compile the module that is called"
    elif found.resumed:
        reason = found.breaks[0] if found.breaks else "no reason was kept"
        evidence += f"; {found.resumed} of them go on after a graph break: {reason}"
        fix = "TORCH_LOGS=graph_breaks shows where; take what breaks the graph out of the model"
    whole = bool(found.regions) and not found.resumed
    observed: Scalar = "in pieces" if found.resumed else bool(found.regions)
    return Judgement(observed, evidence, fix, whole)


def liger(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the launches of Liger's kernels."""
    evidence = f"{seen.liger} launches of its kernels in the step"
    fix = "pip install liger-kernel; it has layers for the Gemma, Llama, Mistral and Qwen families"
    return Judgement(seen.liger > 0, evidence, fix)


def cuda_graphs(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the launches of CUDA graphs."""
    launches = seen.compiler.graph_launches
    fix = "keep shapes fixed and inputs on the GPU; TORCH_LOGS=cudagraphs says what stands against"
    return Judgement(launches > 0, f"{launches} launches in the step", fix)


def sharding(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the parts of the model that were made whole for their computation."""
    if not seen.gathered and requested in _OFF:
        return "each rank holds the whole model"
    evidence = f"FSDP2 made {seen.gathered} parts of the model whole in the forward pass"
    right = (seen.gathered > 0) == (requested not in _OFF)
    observed = "none" if not seen.gathered else requested if right else "fsdp"
    return Judgement(observed, evidence, "optimization.sharding, in a run of torchrun", right)


def checkpointing(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by what of the forward pass ran again in the backward pass."""
    again = seen.recomputed
    evidence = f"{again} operators of the forward pass ran in the backward pass"
    fix = "model.gradient_checkpointing_enable(), with the model in training mode"
    return Judgement(again > 0, evidence, fix, again > 0)


def offloading(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the bytes that went to pinned host memory."""
    evidence = f"{seen.offloaded_bytes:,} bytes were copied to pinned host memory in the step"
    fix = "optimization.offload_activations=true takes tensors of 1 MiB and more, in training alone"
    return Judgement(seen.offloaded_bytes > 0, evidence, fix)


def packing(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the batches themselves."""
    batches = seen.batches
    if batches.packed is None:
        return "the batches have no padding to do without"
    evidence = "rows end to end" if batches.packed else "a row for each sequence"
    if batches.padding_share is not None:
        evidence += f", {batches.padding_share:.1%} of the tokens are padding"
    fix = "give the model packed rows with cu_seqlens"
    return Judgement(batches.packed, evidence, fix)


def effective_batch(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the sequences of the step."""
    count = seen.batches.sequences
    if count is None:
        return "the batches do not say how many"
    fix = "accumulate until all sequences of a step are in, uneven cuts too"
    return Judgement(count, f"{count} sequences in the step", fix)


def accumulation(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the micro-batches of the step: their number follows from memory and cannot fail."""
    count = seen.batches.micro_batches
    if count is None:
        return "no batch was seen"
    evidence = f"{count} micro-batches in the step" if count > 1 else "the step was in one piece"
    return Judgement(count, evidence, right=True, on=count > 1)


def clipping(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the operators that clipping takes."""
    evidence = "gradients were multiplied by a factor bounded by their norm"
    if not seen.clipped:
        evidence = "no norm was followed by a product with all gradients"
    fix = "torch.nn.utils.clip_grad_norm_ before optimizer.step()"
    return Judgement(seen.clipped, evidence, fix)


def set_to_none(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by what zero_grad did."""
    if seen.zeroed is None:
        return "zero_grad was not called in the step"
    evidence = "zero_grad filled gradients with zeros" if seen.zeroed else "zero_grad let them go"
    return Judgement(not seen.zeroed, evidence, "optimizer.zero_grad(set_to_none=True)")


def workers(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the processes that are alive, and whether anybody waited for them."""
    batches = seen.batches
    if requested == ON_GPU:
        evidence = f"{batches.on_gpu} tensors were on the GPU, {batches.tensors} came from the host"
        there = batches.on_gpu > 0 and not batches.tensors
        return Judgement(ON_GPU if there else "host", evidence, "training.data_on_gpu", on=there)
    evidence = f"{batches.workers} loader processes alive"
    if batches.waited_share is not None:
        evidence += f", {batches.waited_share:.1%} of the time spent waiting for data"
    cause = "; batches are made in the training process" if not batches.workers else ""
    fix = "DataLoader(num_workers=…), training.num_workers here; see that none has died"
    right = not isinstance(requested, int) or batches.workers >= requested
    return Judgement(batches.workers, evidence + cause, fix, right)


def pinned_memory(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the tensors, and by the kind of copy that the GPU made."""
    batches = seen.batches
    if batches.tensors:
        observed = batches.pinned == batches.tensors
        evidence = f"{batches.pinned} of {batches.tensors} tensors of the batches are pinned"
    elif batches.pinned_bytes or batches.pageable_bytes:
        observed = batches.pinned_bytes >= batches.pageable_bytes
        evidence = "no batch was seen"
    else:
        return "no batch came from the host"
    evidence += (
        f"; copied to the GPU: {batches.pinned_bytes:,} bytes from pinned memory, "
        f"{batches.pageable_bytes:,} from pageable"
    )
    fix = "DataLoader(pin_memory=True), and copy the tensors that it gives, not others made of them"
    return Judgement(observed, evidence, fix)


def cudnn_benchmark(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by torch's switch, where a convolution gives it something to choose."""
    on = seen.switches.cudnn_benchmark
    if not seen.convolutions and (on or not requested):
        return f"no convolution ran; torch's switch reads {on}"
    fix = "torch.backends.cudnn.benchmark = True; deterministic algorithms turn it off"
    return Judgement(on, f"torch's switch reads {on}; {seen.convolutions} convolutions ran", fix)


def channels_last(_: Scalar, seen: Evidence) -> Judgement | str:
    """Say whether there were convolutions; their layout is not observed."""
    none = "no convolution ran: it is a layout of images, not of text"
    return "the layout of images is not observed" if seen.convolutions else none


def expandable_segments(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by what the allocator says of itself."""
    if "expandable_segments" not in seen.switches.allocator:
        return "this process has no caching allocator of CUDA that tells"
    on = bool(seen.switches.allocator["expandable_segments"])
    fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts"
    return Judgement(on, f"the allocator says {on}", fix)


def deterministic(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by torch's switch."""
    on = seen.switches.deterministic
    return Judgement(on, f"torch's switch reads {on}", "torch.use_deterministic_algorithms(True)")


VERDICTS = {
    "mixed_precision": ReceiptRule("Mixed Precision", mixed_precision),
    "tf32": ReceiptRule("TensorFloat-32 (TF32)", tf32, "it is a mode of NVIDIA GPUs"),
    "quantization": ReceiptRule("Quantized Weights", quantization),
    "fused_optimizer": ReceiptRule("Fused Optimizer", fused_optimizer),
    "optimizer": ReceiptRule("Optimizer", optimizer),
    "offload_optimizer": ReceiptRule("Moments on the Host", offload, "there is no GPU to free"),
    "attention": ReceiptRule("Attention Path", attention),
    "attention_dropout": ReceiptRule("Attention Dropout", attention_dropout),
    "flash_attention": ReceiptRule("Flash Attention", flash_attention, "its kernel is for GPUs"),
    "compile": ReceiptRule("torch.compile", compiled),
    "cuda_graphs": ReceiptRule("CUDA Graphs", cuda_graphs, "they belong to GPUs"),
    "liger": ReceiptRule("Liger Kernels", liger, "its kernels are for GPUs"),
    "sharding": ReceiptRule("Sharded Weights (FSDP2)", sharding),
    "gradient_checkpointing": ReceiptRule("Gradient Checkpointing", checkpointing),
    "offload_activations": ReceiptRule(
        "Activations on the Host", offloading, "there is no GPU to take them from"
    ),
    "packing": ReceiptRule("Sequence Packing", packing),
    "effective_batch": ReceiptRule("Effective Batch Size", effective_batch),
    "gradient_accumulation": ReceiptRule("Gradient Accumulation", accumulation),
    "gradient_clipping": ReceiptRule("Gradient Clipping", clipping),
    "set_to_none": ReceiptRule("zero_grad(set_to_none=True)", set_to_none),
    "workers": ReceiptRule("Loader Workers", workers),
    "pinned_memory": ReceiptRule("Pinned Memory", pinned_memory, "nothing is copied to a GPU"),
    "cudnn_benchmark": ReceiptRule("cuDNN Benchmark Mode", cudnn_benchmark, "cuDNN is for GPUs"),
    "channels_last": ReceiptRule("Channels Last Memory Format", channels_last),
    "expandable_segments": ReceiptRule("Expandable Segments", expandable_segments),
    "deterministic": ReceiptRule("Deterministic Algorithms", deterministic),
}
"""Verdicts in the order in which they are shown."""
