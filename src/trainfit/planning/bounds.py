"""Upper bounds of a step's memory, from the sizes of a model, in microseconds.

Where a job needs a fraction of the GPU that it will train on, a bound decides as well as a
prediction and no step has to be simulated. The counts are generous: every tensor that autograd
could save in an eager step under autocast, all parts at once, and the activations a second time for
captured steps, whose pool is apart. On the recorded steps without checkpointing the bound of an
uncaptured step is 1.1 to 2.6 times the measured peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainfit.hardware.model_shapes import ModelSizes
from trainfit.packing import PackedCut
from trainfit.planning import explain
from trainfit.planning.cuts import FixedSettings
from trainfit.planning.estimator.depths import Taken
from trainfit.planning.estimator.estimate import Target
from trainfit.planning.fit import PARTS, Cutting, StepCandidate
from trainfit.planning.question import Question

PLENTY = 0.6
"""Share of the free memory that a bound may take to decide without a simulation."""
PLENTY_CAPTURED = 0.85
"""The same with the pool of captured steps, which is hardly ever as large as it is counted."""
_WORKSPACE = 0.5 * 2**30
"""Workspaces of cuBLAS and kernels, and the allocator's rounding."""
_LOSS_BYTES = 10
"""Bytes per logit: half-precision logits, float32 ones and their gradient."""
_STORED = {"nf4": 0.53, "int8": 1.1}
"""Bytes of a quantized weight, with its share of the scales."""
_SLACK = 1.02
"""Steps of other seeds and epochs are longer by so much."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Traits of a family's blocks that decide what a step saves."""

    gated: bool = False
    """The feed-forward has two input matrices, whose outputs are multiplied."""
    norms: int = 2
    rms: bool = False
    """Norms are written out in operations on float32 copies."""
    head_norms: bool = False
    """Queries and keys are normalised."""
    positions: bool = True
    """Positions are learned embeddings."""
    slow_gelu: bool = False
    """The activation is written out in operations."""
    scores: bool = False
    """Attention to padded rows keeps its scores."""


_LLAMA = _Family(gated=True, rms=True, positions=False)
_FAMILIES = {
    "bert": _Family(),
    "roberta": _Family(),
    "xlm-roberta": _Family(),
    "camembert": _Family(),
    "electra": _Family(),
    "deberta-v2": _Family(scores=True),
    "modernbert": _Family(gated=True, positions=False),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _Family(gated=True, rms=True, positions=False, head_norms=True),
    "gemma2": _Family(gated=True, norms=4, rms=True, positions=False, scores=True),
    "gemma3_text": _Family(gated=True, norms=4, rms=True, positions=False, head_norms=True),
    "gpt2": _Family(slow_gelu=True),
    "trainfit_gpt": _Family(),
}
"""Families that the bounds were checked for; any other one is simulated."""
_OTHER = _Family()


def unknown_step(fixed: FixedSettings) -> StepCandidate:
    """Return the cut that pads the least, of whose memory and time nothing is known."""
    nothing: dict[str, Any] = dict.fromkeys((*PARTS, "peak_allocated", "peak_reserved"), 0.0)
    return StepCandidate(
        checkpointing="none" if fixed.checkpointing is None else fixed.checkpointing.value,
        cutting=fixed.cuttings[fixed.plain],
        taken=Taken(**nothing, fits=None, done=()),
        seconds=None,
        flops=0.0,
    )


def bounded(
    question: Question, fixed: FixedSettings, cutting: Cutting, target: Target, ranks: int
) -> StepCandidate | None:
    """Return the cut without checkpointing where a bound of its memory leaves plenty of room.

    None: the bound is too high, or there is none for the model.
    """
    sizes, gpu = question.sizes, float(target.compute_capability) > 0
    if sizes is None or sizes.family not in _FAMILIES:
        return None
    length = question.workload.max_length
    rows = question.pinned("batch_size") or -(-cutting.cut.tokens // length)
    longest = max(map(max, question.folds))
    scores = _FAMILIES[sizes.family].scores and not fixed.packed.value
    load = Load(
        tokens=round(_SLACK * cutting.cut.tokens),
        longest=longest,
        # A CPU may compute all scores.
        attention=fixed.attention.value if gpu and not scores else "own",
        evaluated=explain.eval_batch(question, rows).value * longest,
        ranks=ranks,
        captured=gpu,
        sequences=cutting.cut.slots if isinstance(cutting.cut, PackedCut) else 0,
    )
    method = question.workload.method
    taken = bound(sizes, fixed.arguments, method, load)
    alone = bound(sizes, fixed.arguments, method, replace(load, captured=False))
    if (
        alone.peak_reserved > PLENTY * target.capacity
        or taken.peak_reserved > PLENTY_CAPTURED * target.capacity
    ):
        return None
    return StepCandidate(
        checkpointing="none" if fixed.checkpointing is None else fixed.checkpointing.value,
        cutting=cutting,
        taken=taken,
        seconds=None,
        flops=0.0,
    )


def block_weights(sizes: ModelSizes) -> int:
    """Weights of the matrices of a block."""
    matrices = 3 if _FAMILIES.get(sizes.family, _OTHER).gated else 2
    attention = 2 * sizes.hidden * (sizes.attention + sizes.keys)
    return attention + matrices * sizes.hidden * sizes.inner


def count_weights(sizes: ModelSizes) -> int:
    """Bound the number of weights; biases, norms, positions and a pooler count.

    Of another family than those above it is an estimate, for times alone.
    """
    family = _FAMILIES.get(sizes.family, _OTHER)
    vectors = 4 * sizes.hidden + 2 * (sizes.attention + sizes.keys + sizes.inner)
    blocks = sizes.layers * (block_weights(sizes) + vectors + 2 * family.norms * sizes.hidden)
    rows = sizes.vocabulary + (sizes.positions + 8 if family.positions else 0)
    return blocks + (rows + sizes.hidden + 1024) * sizes.hidden


def block_bytes(sizes: ModelSizes, *, half: bool, method: str = "full") -> float:
    """Bound the bytes per token that a block saves for its backward pass."""
    family, hidden, inner = _FAMILIES[sizes.family], sizes.hidden, sizes.inner
    wide = sizes.attention + 2 * sizes.keys
    full = method == "full"
    width = 2 if half else 4
    # A cast of the input for each projection, their outputs, rotated copies, and the result.
    attention = width * (3 * hidden + 2 * wide + 2 * sizes.attention + hidden)
    if family.head_norms:
        attention += 12 * (sizes.attention + sizes.keys)
    if method in ("lora", "dora"):  # dropout before each adapter: a copy and a mask
        attention += (width + 1) * (2 * hidden + sizes.attention)
    if method == "dora":  # results of the layers, scaled
        attention += 3 * width * (wide + hidden)
    per_norm = 4 * (3 if full else 2) if family.rms else 4 * 2
    norms = family.norms * per_norm * hidden
    masks = 2 * hidden
    # Weights that are not trained need no inputs in the backward pass.
    kept = (4 if full else 3) if family.gated else 2
    feed_forward = width * (kept * inner + (2 if family.gated else 1) * hidden)
    if family.slow_gelu:
        feed_forward += 24 * inner
    return float(attention + norms + masks + feed_forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A step on one device, as far as its memory goes."""

    tokens: int
    """Tokens of its largest micro-batch, padding included."""
    longest: int
    """Longest sequence, or width of padded rows."""
    attention: str
    """Path of attention, as the plan names it."""
    evaluated: int
    """Tokens of an evaluation's batch."""
    ranks: int = 1
    captured: bool = True
    """Steps may be captured, with the activations in a pool of their own."""
    sequences: int = 0
    """Slots for sequences in a packed row; 0 for padded rows."""


def bound(sizes: ModelSizes, arguments: dict[str, Any], method: str, load: Load) -> Taken:
    """Bound the memory of a step; `arguments` are those of the job's probe."""
    half = arguments["precision"] != "fp32"
    weights = count_weights(sizes)
    adapters = _adapters(sizes, arguments) if method in ("lora", "dora") else 0
    head = sizes.hidden * (64 + (sizes.hidden if arguments.get("pooling") == "auto" else 0))
    trained = {"full": weights, "frozen": head}.get(method, adapters + head)
    stored = 4 if arguments.get("dtype", "float32") == "float32" else 2
    casts = 2 * weights if half and stored == 4 else 0
    block = block_bytes(sizes, half=half, method=method)
    # Besides the blocks: embeddings, the head, and the gradients of a block under way.
    passing = 2 * block + _attention_bytes(sizes, load, half)
    saved = 0.0 if method == "frozen" else sizes.layers * (block + _scores(sizes, load))
    activations = load.tokens * (saved + passing) + _loss(sizes, arguments, load)
    activations += _per_sequence(sizes, load)
    if load.captured and method != "frozen":
        activations *= 2
    activations += load.evaluated * passing
    if method == "full":  # the embedding's dense gradient, twice while it is summed up
        activations += 2 * 4 * sizes.vocabulary * sizes.hidden
    wide = stored * weights + casts
    workspace = _WORKSPACE
    kind = arguments.get("quantization", "none")
    if kind != "none":
        # Biases and norms stay wide, and so does the matrix in use, which may be two in one.
        codes = sizes.layers * block_weights(sizes)
        wide -= int(codes * (wide / weights - _STORED[kind]))
        largest = sizes.hidden * max(2 * sizes.inner, sizes.attention + 2 * sizes.keys)
        workspace += 2 * 4 * largest
    parts = {
        "weights": wide,
        "adapters": 4 * adapters,
        "gradients": 4 * trained * (1 if load.ranks == 1 else 2),
        "optimizer": _state(arguments, trained, method),
        "activations": activations,
        "workspace": workspace,
    }
    total = sum(parts.values())
    return Taken(
        **parts,
        parameters=weights,
        peak_allocated=total,
        peak_reserved=total,
        fits=True,
        done=(),
        family=sizes.family,
        bound=True,
    )


_STATE = {"adamw_fused": 8, "adamw_bf16": 4, "adamw_8bit": 3}
"""Bytes per trained weight of the optimizers that take no memory in an update."""
_OTHER_STATE = 16
"""The same for all others, with the copies and temporaries of an update."""
_SLOTS = 4 * 4 * 8 * 2**20
"""Bytes on the GPU for moments that are in the host's memory."""


def fetched_bytes(arguments: dict[str, Any]) -> int:
    """Bytes per trained weight that an update fetches from the host."""
    kind = arguments.get("optimizer", "adamw_fused")
    return _STATE[kind] if arguments.get("offload_optimizer") else 0


def _state(arguments: dict[str, Any], trained: float, method: str) -> float:
    """Bound the memory of the optimizer's state and of its update."""
    kind = arguments.get("optimizer", "adamw_fused")
    each = _STATE.get(kind, _OTHER_STATE)
    if kind == "adamw_8bit" and method != "full":
        each = 8  # small matrices keep float32 moments
    total = each * trained
    return min(total, _SLOTS) if arguments.get("offload_optimizer") else total


def _adapters(sizes: ModelSizes, arguments: dict[str, Any]) -> int:
    """Bound the weights of adapters on the projections of attention."""
    wide = 4 * sizes.hidden + 2 * (sizes.attention + sizes.keys)
    return int(sizes.layers * (arguments.get("lora_rank", 16) + 1) * wide)


def _attention_bytes(sizes: ModelSizes, load: Load, half: bool) -> float:
    """Bytes per token that attention holds as it runs: DeBERTa's scores by distance, or a mask."""
    if load.attention != "disentangled":
        return 8.0 * load.longest if load.attention in ("sdpa", "own") else 0.0
    return 2 * sizes.heads * 2 * load.longest * (2 if half else 4) * 2


def _per_sequence(sizes: ModelSizes, load: Load) -> float:
    """Bytes that the memory-efficient kernel takes for each sequence as if it were the longest.

    Every block saves a number per row; the running backward pass sums three gradients in fp32.
    """
    if load.attention != "varlen_efficient":
        return 0.0
    sequences = load.sequences + load.tokens // load.longest + 1  # the last ones cover the filler
    rows = sequences * sizes.heads * (load.longest + 128)
    return 4.0 * rows * (sizes.layers + 3 * (sizes.attention // sizes.heads + 128))


def _scores(sizes: ModelSizes, load: Load) -> float:
    """Bytes per token that a block saves where attention keeps its scores."""
    return 20.0 * sizes.heads * load.longest if load.attention == "own" else 0.0


def _loss(sizes: ModelSizes, arguments: dict[str, Any], load: Load) -> float:
    """Bytes of a GPT's logits; a classifier has next to none."""
    if sizes.family != "trainfit_gpt":
        return 0.0
    at_once = min(arguments.get("loss_chunk") or load.tokens, load.tokens)
    return float(_LOSS_BYTES * at_once * sizes.vocabulary)
