"""Verdicts of the receipt: requested against observed, one function for each optimization.

A verdict takes the requested value (None where it is unknown) and the evidence of a step. It
returns a judgement, or the reason why the optimization cannot apply to the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.core.records import Scalar
from trainfit.measuring.trace import HOST, AttentionSeen, Evidence

_HALF = ("bf16", "fp16")
OFF = (None, False, "off", "none", "fp32", 0)
_FP32_SHARE = 0.01
"""Least share of fp32 products for exact kernels to count as evidence against TF32."""
ON_GPU = "data on the GPU"  # requested in place of loader processes


@dataclass(frozen=True, slots=True)
class Judgement:
    """Observed value of a setting, with its evidence and the fix where it is not as requested."""

    observed: Scalar
    evidence: str
    fix: str = ""
    right: bool | None = None
    """False if the observation is not as requested; None: compare the values."""
    on: bool | None = None
    """True if the optimization is on; None: the observed value says so."""


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
    if right or requested in OFF:
        return Judgement(observed, evidence, right=right)
    cause, fix = _no_half(requested, seen)
    return Judgement(observed, f"{evidence}; {cause}", fix)


def _no_half(requested: Scalar, seen: Evidence) -> tuple[str, str]:
    """Reason that the products were not in the requested dtype, and the fix."""
    if seen.products.dtype in _HALF:
        return f"that is not {requested}", f"give autocast the dtype of {requested}"
    if seen.products.casts:
        cause = "some tensors were cast, so autocast is off around most of the model"
        return cause, "keep the whole forward pass inside torch.autocast"
    cause = "no tensor was cast: autocast was off in the forward pass"
    return cause, "run forward and loss under torch.autocast, with the type of the device in use"


def quantization(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the dtype of the codes that products of the step were made with."""
    found = seen.quantized
    if not found.products and not seen.attention.calls and not seen.attention.softmaxes:
        if requested in OFF:
            return "no product with quantized weights ran in the step"
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
    fast = products.tf32_kernels
    if fast or exact:
        observed = fast > 0
        evidence = f"{fast} products in TF32 kernels, {products.exact_kernels} exact"
    else:
        observed = bool(switch)
        evidence = f"torch's switch reads {switch}; {share:.0%} of the products are in fp32"
    fix = "torch.backends.cuda.matmul.fp32_precision = 'tf32', or device.tf32=true"
    return Judgement(observed, evidence, fix)


# ── the compiler ──────────────────────────────────────────────────────────────────────────────


def compiled(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the compiled regions that ran, and whether graph breaks cut them into pieces."""
    found = seen.compiler
    counts = f"{found.graphs} graphs, {found.recompiles} recompiles"
    evidence, fix = f"{found.regions} compiled regions ran in the step; {counts}", ""
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
    if not seen.gathered and requested in OFF:
        return "each rank holds the whole model"
    evidence = f"FSDP2 made {seen.gathered} parts of the model whole in the forward pass"
    right = (seen.gathered > 0) == (requested not in OFF)
    observed = "none" if not seen.gathered else requested if right else "fsdp"
    return Judgement(observed, evidence, "optimization.sharding, in a run of torchrun", right)


def checkpointing(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by operations of the forward pass that ran again in the backward pass."""
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
    fix = "accumulate until all samples of a step are in, uneven cuts too"
    return Judgement(count, f"{count} samples in the step", fix)


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
    """Judge by the gradients after zero_grad: None, or zeros."""
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
    return "the layout is not observed" if seen.convolutions else "no convolution ran"


def expandable_segments(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the allocator's own settings."""
    if "expandable_segments" not in seen.switches.allocator:
        return "this process has no caching allocator of CUDA that tells"
    on = bool(seen.switches.allocator["expandable_segments"])
    fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts"
    return Judgement(on, f"the allocator says {on}", fix)


def deterministic(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by torch's switch."""
    on = seen.switches.deterministic
    return Judgement(on, f"torch's switch reads {on}", "torch.use_deterministic_algorithms(True)")


# ── kernels: attention, and the update of the weights ────────────────────────────────────────────

_SDPA = ("flash", "efficient", "cudnn", "math", "cpu")
_OWN = {
    "disentangled": "the model has attention of its own",
    "softcapped": "the model caps its logits, which the flash kernel does not do",
}
_ATTENTION_FIXES = {
    "flash": "see flash_attention",
    "varlen": "packed rows in half precision on compute capability 8.0 or newer",
    "varlen_efficient": "packed rows on an NVIDIA GPU",
    **dict.fromkeys(_OWN, "packed rows on a GPU with Triton"),
}
_LARGEST_HEAD = 256


def attention(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the kernel that was called most."""
    found = seen.attention
    if found.kernel is None and not found.softmaxes:
        return "no attention was computed in the step"
    observed = found.kernel or "eager"
    calls = ", ".join(f"{count} {kernel}" for kernel, count in found.calls.items())
    evidence = f"calls: {calls}" if calls else f"{found.softmaxes} softmaxes and no kernel"
    if found.masked:
        evidence += ", with a mask"
    right = {"sdpa": observed in _SDPA, "own": True, "job": True, "flash": _is_flash(found)}.get(
        str(requested), requested == observed
    )
    built = f"build the model with attn_implementation={str(requested)!r}"
    return Judgement(observed, evidence, _ATTENTION_FIXES.get(str(requested), built), right)


def attention_dropout(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the number that the attention kernel was given."""
    found = seen.attention
    if found.dropout is None:
        return "no attention kernel ran that tells its dropout"
    evidence = f"the {found.kernel} kernel was given dropout {found.dropout:g}"
    return Judgement(found.dropout, evidence, "train with model.attention_dropout as planned")


def flash_attention(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the attention kernel that ran, and the reason if it is another one."""
    found = seen.attention
    if found.kernel is None or found.kernel in _OWN:
        return _OWN.get(found.kernel or "", "no attention kernel ran")
    observed = _is_flash(found)
    cause, fix = _no_flash(seen)
    evidence = f"the {found.kernel} kernel ran" + ("" if observed else f": {cause}")
    return Judgement(observed, evidence, fix)


def _is_flash(found: AttentionSeen) -> bool:
    """True for a flash kernel, or cuDNN's without a mask, which newer GPUs prefer."""
    return found.kernel in ("flash", "varlen") or (found.kernel == "cudnn" and not found.masked)


def _no_flash(seen: Evidence) -> tuple[str, str]:
    found = seen.attention
    if found.masked:
        fix = "pack sequences (training on packed rows needs no mask), or pass is_causal"
        return "a mask was passed, which the flash kernel does not take", fix
    if found.dtype not in _HALF:
        return f"it was given {found.dtype}, and takes half precision", "mixed precision"
    if found.head is not None and found.head > _LARGEST_HEAD:
        return f"heads of {found.head} are too large for it", "a model with smaller heads"
    if seen.switches.flash is False:
        return "torch's switch for it is off", "torch.backends.cuda.enable_flash_sdp(True)"
    return "torch chose another", "see torch.backends.cuda.can_use_flash_attention"


_FUSED = ("fused", "compiled", "own")
_HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch with a fused kernel."""
_MOMENTS = {"adamw_fused": "float32", "adamw": "float32", "adamw_bf16": "bfloat16"}
"""Dtype of the moments by optimizer; those of adamw_8bit are uint8 unless all weights are small."""
_BY_CLASS = {"Muon": "muon", "Adafactor": "adafactor", "AdamW8bit": "adamw_8bit"}
_NO_STEP = "no optimizer step was seen"


def fused_optimizer(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the operators that updated the weights."""
    if not seen.updates:
        return _NO_STEP
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
    return Judgement(observed, evidence, fix)


def optimizer(requested: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the operators that updated the weights, and by the dtype of the moments."""
    if not seen.updates:
        return _NO_STEP
    observed = _observed(seen)
    evidence = f"updates by {', '.join(f'{n} ({kind})' for n, kind in seen.optimizers.items())}"
    if seen.moments:
        sizes = (f"{size / 2**20:,.1f} MiB {where}" for where, size in seen.moments.items())
        evidence += f"; state: {', '.join(sizes)}"
    dtype = _MOMENTS.get(observed)
    kept = not seen.moments or dtype is None or any(n.startswith(dtype) for n in seen.moments)
    fix = f"train with optimization.optimizer={requested}, and no optimizer of the job's own"
    return Judgement(observed, evidence, fix, requested == observed and kept)


def _observed(seen: Evidence) -> str:
    """Name of the optimizer in a configuration, or of its class."""
    names = seen.optimizers
    for name, known in _BY_CLASS.items():
        if name in names:
            return known
    if "SmallAdamW" in names:
        kinds = {where.partition(" ")[0] for where in seen.moments}
        return "adamw_bf16" if "bfloat16" in kinds else "adamw_8bit"
    if "AdamW" in names:
        return "adamw_fused" if names["AdamW"] == "fused" else "adamw"
    return next(iter(names), "unknown")


def offload(_: Scalar, seen: Evidence) -> Judgement | str:
    """Judge by the memory that holds the moments, and the copies from it."""
    held = sum(size for where, size in seen.moments.items() if where.endswith(f" on {HOST}"))
    fetched = f"fetched by {seen.fetched} copies in the step"
    evidence = f"{held / 2**20:,.1f} MiB of moments in the host's memory, {fetched}"
    fix = "use adamw_fused or adamw_bf16, which trainfit keeps there, on an NVIDIA GPU"
    return Judgement(held > 0 and seen.fetched > 0, evidence, fix)
