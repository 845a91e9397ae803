"""Ways to run a job's steps: eager or compiled, launched kernel by kernel or as a captured graph.

Without a simulation, kernels take a step's necessary operations at the share of the GPU's peak that
recorded steps of the family attained; launches take the machine's cost of one, times the operations
of a block. What is chosen is what the whole job gains by, all folds and trials together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainfit.core.records import HardwareProfile
from trainfit.hardware.model_shapes import ModelFlops, ModelSizes
from trainfit.planning import decide
from trainfit.planning.bounds import block_weights, count_weights
from trainfit.planning.estimator.estimate import GIB
from trainfit.planning.estimator.step_time import REPLAY_SECONDS, Rates, calibration, smooth_maximum
from trainfit.planning.fit import Cutting, StepCandidate
from trainfit.planning.question import Choice, Question

CAPTURE_SECONDS = 0.5
"""Cost of capturing a step as a graph, once for all folds: 0.2 to 0.6 s beside an H200."""
_COMPILERS, _KIND, _OPERATION = 2.0, 27.0, 0.2
"""Seconds of starting compilers, and those of a core for a kind of block and for each of its
operations: 5 s for BERT-base on 16 cores, 10 s for ModernBERT, 15 s for Gemma 3 with DoRA."""
_LEAST_GAIN = 1.02
"""Least gain in speed; a smaller one is within the noise of the estimate."""
_UPDATE_BYTES = 40
"""Bytes of memory traffic per trained weight: clipping and the fused AdamW."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """Speed of a family's steps: shares of the dense half-precision peak, operations per block."""

    eager: float
    compiled: float
    operations: int
    """Kernels that an eager block launches, forward and backward."""
    kinds: int = 1
    """Kinds of blocks, each of which is compiled: by window, and ModernBERT's first."""


_LLAMA = _Pace(0.25, 0.45, 180)
_PACES = {
    "deberta-v2": _Pace(0.185, 0.22, 130),
    "modernbert": _Pace(0.19, 0.31, 94, kinds=3),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _Pace(0.25, 0.45, 220),
    "gemma2": _Pace(0.25, 0.45, 220, kinds=2),
    "gemma3_text": _Pace(0.25, 0.45, 257, kinds=2),
    "trainfit_gpt": _Pace(0.43, 0.51, 51),
}
"""By the steps recorded on an H200; the others are as BERT."""
_BERT = _Pace(0.245, 0.32, 108)
_METHODS = {"full": (1.0, 1.0, 1.0), "lora": (0.75, 0.8, 1.2), "dora": (0.57, 0.65, 1.6)}
"""Factors of a method on the shares, eager and compiled, and on the operations."""
_FORWARD = (2.0, 1.1, 0.4)
"""The same for a frozen encoder, which has no backward pass."""
_FULL_PRECISION = 2.0
"""Factor on the shares of the float32 or TF32 peak, which are easier to attain."""
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Shares of the activations of compiled blocks that are tried, before whole blocks are computed
again."""
_FUSED = 0.5
"""Operations of a block that are left after compiling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to run steps, and its seconds per step."""

    compile: bool = False
    cuda_graph: bool = False
    seconds: float


def compile_cost(question: Question, cores: int) -> float:
    """Seconds that compiling takes once, with a cold cache."""
    family = "" if question.sizes is None else question.sizes.family
    return family_compiling(family, cores, question.workload.method)[0]


def family_compiling(family: str, cores: int, method: str = "full") -> tuple[float, float]:
    """Seconds that compiling a model of a family takes, and the share of a step that it saves."""
    pace, (_, _, more) = _PACES.get(family, _BERT), _METHODS.get(method, _FORWARD)
    work = pace.kinds * (_KIND + _OPERATION * pace.operations * more)
    return _COMPILERS + work / max(cores, 1), 1 - pace.eager / pace.compiled


def flops_of(sizes: ModelSizes, method: str) -> ModelFlops:
    """Count the operations of a model; a GPT's tokens also meet its output layer."""
    weights = sizes.layers * block_weights(sizes)
    if sizes.family == "trainfit_gpt":
        weights += sizes.vocabulary * sizes.hidden
    return ModelFlops(
        weights=weights,
        passed=0 if method == "frozen" else weights,
        trained=weights if method == "full" else 0,
        width=sizes.attention,
        full_layers=sizes.layers,
    )


def step_flops(sizes: ModelSizes, method: str, cutting: Cutting, tokens: float) -> float:
    """Necessary operations of a rank's step of `tokens` tokens."""
    lengths = cutting.lengths or (cutting.width,) * cutting.rows
    return flops_of(sizes, method).of_step(lengths) * tokens / sum(lengths)


def ways_of(
    sizes: ModelSizes, method: str, cutting: Cutting, rates: Rates | None, fetched: int = 0
) -> list[Way]:
    """Estimate every way to run the steps of a cut, eager first; none where no peak is known.

    `fetched` are bytes per trained weight that come from the host for an update.
    """
    if rates is None:
        return []
    pace, fitted = _PACES.get(sizes.family, _BERT), calibration()
    eager, compiled, more = _METHODS.get(method, _FORWARD)
    peak = rates.half or rates.full / _FULL_PRECISION
    computed = step_flops(sizes, method, cutting, cutting.computed) / peak
    trained = count_weights(sizes) if method == "full" else 0
    update = _UPDATE_BYTES * trained / (rates.bandwidth * fitted.copy)
    update += fetched * trained / rates.link
    blocks = cutting.cut.micro_batches * sizes.layers
    forward = fitted.forward_launch_seconds * rates.forward_launch
    backward = fitted.backward_launch_seconds * rates.backward_launch
    operations = pace.operations * more
    calls = 2 * fitted.compiled_call_seconds
    fused = _FUSED * operations * fitted.compiled_launch_seconds
    kernels = (
        computed / (pace.eager * eager) + update,
        computed / (pace.compiled * compiled) + update,
    )
    launches = (
        blocks * operations * (forward + backward) / 2,
        blocks * rates.forward_launch * (calls + fused),
    )
    return [
        Way(
            compile=bool(kind),
            cuda_graph=graph,
            seconds=kernels[kind] + REPLAY_SECONDS
            if graph
            else smooth_maximum(kernels[kind], launches[kind]),
        )
        for graph in (False, True)
        for kind in (0, 1)
    ]


def execution(
    question: Question,
    profile: HardwareProfile,
    ways: Sequence[Way],
    steps: float,
    *,
    captured: bool,
) -> tuple[Way | None, Choice]:
    """Choose the way that ends a job of `steps` optimizer steps the soonest, and say why.

    Steps that can be `captured` are: it takes no more memory than is there, and pays at once.
    """
    pin = decide.pinned(question, "compile")
    able = {way.compile: way for way in ways if way.cuda_graph == captured}
    if pin is not None:
        return able.get(bool(pin.value)), pin
    obstacle = compile_obstacle(profile)
    if obstacle is not None or not able:
        why = obstacle or "how fast it would be is not known; measure it"
        return able.get(False), Choice(value=False, why=why, alternatives=("true",))
    cost = compile_cost(question, profile.cpu.cores)
    choice = _weigh(able[False].seconds, able[True].seconds, steps, cost)
    return able[choice.value], choice


def _weigh(eager: float, compiled: float, steps: float, cost: float) -> Choice:
    """Compile where that saves more in `steps` steps than it costs."""
    gain, saved = eager / compiled, steps * (eager - compiled)
    if saved <= cost or gain < _LEAST_GAIN:
        why = f"it would save {max(saved, 0):.0f} s of the job and cost {cost:.0f} s"
        return Choice(value=False, why=why, alternatives=("true",))
    why = f"{gain:.2f} times as fast; saves {saved:,.0f} s of the job"
    return Choice(value=True, why=why, alternatives=("false",))


def compiled_or_eager(
    question: Question,
    profile: HardwareProfile,
    eager: StepCandidate,
    fits: bool,
    compiled: Callable[[], StepCandidate] | None,
    steps: float,
    agreed: Choice | None = None,
) -> tuple[Choice, StepCandidate, bool]:
    """Compile where the machine can, the step still fits, and the job is long enough.

    Returns the choice, the candidate that then runs, and True if it fits. `compiled` simulates the
    compiled step; it is None where many GPUs are compared. `agreed` is the choice of a run that
    simulates nothing.
    """

    def stay(why: str) -> tuple[Choice, StepCandidate, bool]:
        return Choice(value=False, why=why, alternatives=("true",)), eager, fits

    gpu = profile.gpu
    pin = decide.pinned(question, "compile") or agreed
    if pin is not None and (gpu is None or not pin.value):
        return pin, eager, fits  # the estimator knows CUDA's compiled code alone
    if compiled is None:
        return stay("GPUs are compared without it")
    cost = compile_cost(question, profile.cpu.cores)
    obstacle = compile_obstacle(profile) or _too_short(eager, steps, cost)
    reason = None if pin is not None else obstacle
    if reason is not None:
        return stay(reason)
    candidate = compiled()
    still = bool(candidate.taken.fits)
    if pin is not None:
        return pin, candidate, still
    if fits and not still:
        need = candidate.taken.peak_allocated / GIB
        return stay(f"compiled, the step would need {need:.1f} GiB")
    if eager.seconds is None or candidate.seconds is None:
        return stay("how fast it would be is not known; measure it")
    choice = _weigh(eager.seconds, candidate.seconds, steps, cost)
    if not choice.value:
        return choice, eager, fits
    other = f"false: {eager.taken.peak_allocated / GIB:.1f} GiB"
    return replace(choice, alternatives=(other,)), candidate, still


def largest_budget(
    run: Callable[[float], StepCandidate],
) -> tuple[float, StepCandidate] | None:
    """Find the largest share of its activations that a compiled step can keep, by halving."""
    found, low, high = None, 0, len(BUDGETS)
    while low < high:
        middle = (low + high) // 2
        candidate = run(BUDGETS[middle])
        if candidate.taken.fits:
            found, high = (BUDGETS[middle], candidate), middle
        else:
            low = middle + 1
    return found


def keep_activations(
    question: Question,
    best: StepCandidate,
    graph: Choice,
    run: Callable[[float], StepCandidate],
) -> tuple[StepCandidate, dict[str, Choice]]:
    """Keep as many activations of compiled blocks as fit, instead of computing blocks again.

    Returns the faster step, and its choices that differ. `graph` is whether a step without
    checkpointing is captured. `run` simulates the step that keeps a share of its activations.
    """
    mode = best.checkpointing
    if mode == "none" or {"gradient_checkpointing", "activation_budget"} & question.pins.keys():
        return best, {}
    budget, kept = largest_budget(run) or (0.0, best)
    if best.seconds is None or kept.seconds is None or kept.seconds >= best.seconds:
        return best, {}
    slower = f"{best.seconds / kept.seconds - 1:+.0%} time"
    others = (f"{mode}: {best.taken.peak_allocated / GIB:.1f} GiB, {slower}",)
    if graph.value and "cuda_graph" not in question.pins:
        graph = Choice(
            value=False, why="its pool would not fit beside the activations", alternatives=("true",)
        )
    why = "compiled, the activations fit, so nothing is computed twice"
    made = {"cuda_graph": graph}
    if budget < 1:
        why = f"compiled blocks keep {budget:.0%} of their activations, which is faster"
        share = "the most that fits: what is cheapest to compute again is"
        made["activation_budget"] = Choice(value=budget, why=share)
    return kept, made | {
        "gradient_checkpointing": Choice(value="none", why=why, alternatives=others)
    }


def may_compile(question: Question, profile: HardwareProfile) -> bool:
    """Tell if `compiled_or_eager` may simulate the compiled step."""
    pin = decide.pinned(question, "compile")
    able = bool(pin.value) if pin is not None else compile_obstacle(profile) is None
    return profile.gpu is not None and able


def compile_obstacle(profile: HardwareProfile) -> str | None:
    """Return the reason why nothing can be compiled on a machine; None: it can."""
    gpu = profile.gpu
    if gpu is None or gpu.vendor == "apple":
        return "compiling pays on CUDA and ROCm GPUs"
    missing = profile.compile.missing(gpu=True)
    if missing and not profile.simulated:
        return f"it would fail here: {' and '.join(missing)} missing"
    return None


def _too_short(eager: StepCandidate, steps: float, cost: float) -> str | None:
    # Hardly a recorded step became twice as fast.
    if eager.seconds is None or steps * eager.seconds / 2 >= cost:
        return None
    return f"the job is too short to pay it back (about {cost:.0f} s)"
