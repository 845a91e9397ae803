"""Plans against arithmetic, and the short cuts of the planner against the long way."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import write_bert

from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan, Workload
from trainfit.core.records import Measurement, Measurements
from trainfit.hardware import as_if
from trainfit.hardware.catalogue import find, gpus
from trainfit.hardware.model_shapes import model_shape
from trainfit.jobs.job_plan import assumed_lengths, plan, plan_all, question
from trainfit.jobs.models.classifier_settings import model_facts
from trainfit.packing import coarser_cuts, ladder
from trainfit.planning import decide, planner
from trainfit.planning.estimator import depths
from trainfit.planning.estimator.depths import Taken
from trainfit.planning.estimator.estimate import CONTEXT_GIB, GIB, MARGIN, target
from trainfit.planning.estimator.step_time import Done, Work, rates, seconds
from trainfit.planning.fit import Speed, profile_cuts
from trainfit.planning.question import Pin, Question
from trainfit.planning.savers import count_savers

LAYERS, WIDTH, VOCABULARY, INNER, POSITIONS = 6, 128, 1000, 512, 256
ENCODER = "trainfit.jobs.probes:encoder_step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small BERT by its config alone."""
    place = tmp_path_factory.mktemp("model")
    return write_bert(place, layers=LAYERS, width=WIDTH, max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def parameters() -> int:
    """Of a BERT without a pooler, with a head of two classes."""
    embeddings = (VOCABULARY + POSITIONS + 2) * WIDTH + 2 * WIDTH
    attention = 4 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH
    feed_forward = 2 * WIDTH * INNER + INNER + WIDTH + 2 * WIDTH
    return embeddings + LAYERS * (attention + feed_forward) + 2 * WIDTH + 2


def small(folder: str, *overrides: str, **more: Any) -> Plan:
    words = (f"model.name={json.dumps(folder)}", "model.method=full", "data.max_length=128")
    return plan("nli", *words, *overrides, **more)


@pytest.fixture(scope="module")
def roomy(folder: str) -> Plan:
    return small(folder, gpu="h200")


def test_a_plan_has_the_memory_of_its_parts(roomy: Plan):
    assert roomy.memory is not None
    assert roomy.memory.weights_gib * GIB == pytest.approx(4 * parameters(), rel=0.01)
    assert roomy.memory.gradients_gib * GIB == pytest.approx(4 * parameters(), rel=0.01)
    assert roomy.memory.optimizer_gib * GIB == pytest.approx(8 * parameters(), rel=0.01)
    assert roomy.memory.capacity_gib == pytest.approx(find("h200").memory_gib - CONTEXT_GIB)


def test_with_room_nothing_is_computed_twice_or_cut(roomy: Plan):
    assert roomy.fits
    assert roomy.gradient_checkpointing == "none"
    assert roomy.gradient_accumulation_steps == 1
    assert (roomy.packed, roomy.attention, roomy.precision) == (True, "varlen", "bf16")
    assert roomy.effective_batch_size == 16


def test_times_follow_from_one_another(roomy: Plan):
    time = roomy.time
    assert time is not None
    assert time.step_seconds is not None
    assert time.samples_per_second == pytest.approx(16 / time.step_seconds)
    steps = math.ceil(roomy.workload.sequences / 16)
    assert time.epoch_seconds == pytest.approx(steps * time.step_seconds)
    assert time.total_seconds == pytest.approx(20 * steps * time.step_seconds)
    assert time.error_percent is not None
    assert time.mfu is not None
    # 6 operations per token and weight of the matrix products, and attention besides.
    dense = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    assert time.tokens_per_second is not None
    done = time.mfu * 989.4e12 / time.tokens_per_second
    assert 6 * dense < done < 6 * dense * 1.3


def test_every_setting_has_a_reason(roomy: Plan):
    named = {reason.setting for reason in roomy.reasons}
    assert named >= {"precision", "batch_size", "gradient_checkpointing", "compile", "optimizer"}
    assert all(reason.why for reason in roomy.reasons)


def test_what_is_pinned_is_honoured_and_the_rest_planned_around_it(folder: str):
    made = small(
        folder,
        "device.mixed_precision=off",
        "model.use_gradient_checkpointing=true",
        "training.batch_size=3",
        "training.effective_batch_size=17",
        "training.num_workers=1",
        "optimization.optimizer=adamw",
        "optimization.compile=false",
        gpu="t4",
        watts=70,
        price_per_hour=0.5,
    )
    assert made.fits
    assert (made.precision, made.gradient_checkpointing) == ("fp32", "full")
    assert made.batch_size == 3
    assert made.micro_batch_tokens <= 3 * 128
    assert made.effective_batch_size == 17  # does not divide, and is no error
    assert (made.num_workers, made.optimizer, made.compile) == (1, "adamw", False)
    assert (made.packed, made.attention) == (True, "varlen_efficient")
    assert made.time is not None
    assert made.time.total_seconds is not None
    assert made.time.energy_kwh == pytest.approx(70 * made.time.total_seconds / 3.6e6)
    assert made.time.cost == pytest.approx(0.5 * made.time.total_seconds / 3600)
    assert made.time.error_percent is None  # nothing was recorded on that architecture
    said = {reason.setting: reason.why for reason in made.reasons}
    assert said["batch_size"] == "you set it"


@pytest.mark.soak
def test_less_memory_is_met_by_recomputing_and_cutting(folder: str, roomy: Plan):
    assert roomy.memory is not None
    words = ("training.effective_batch_size=256",)
    free = small(folder, *words, gpu="h200")
    assert free.memory is not None
    cap = free.memory.peak_allocated_gib * 0.5
    tight = small(folder, *words, gpu="h200", memory_gib=cap)
    assert tight.memory is not None
    assert tight.fits
    assert tight.memory.peak_allocated_gib <= cap * (1 - MARGIN)
    assert (tight.gradient_checkpointing, tight.gradient_accumulation_steps) != ("none", 1)
    assert tight.effective_batch_size == 256
    assert tight.cuts[0] == tight.gradient_accumulation_steps
    assert list(tight.cuts) == sorted(set(tight.cuts))


@pytest.mark.soak
def test_what_does_not_fit_says_what_would(folder: str):
    made = small(folder, gpu="h200", memory_gib=0.05)
    assert not made.fits
    assert made.advice
    named = [row for row in gpus() if any(row.slug in line for line in made.advice)]
    assert made.memory is not None
    assert named
    assert all(row.memory_gib > made.memory.peak_allocated_gib for row in named)


def test_small_depths_tell_what_all_layers_take(folder: str):
    arguments = {
        "name": folder,
        "weights": "random",
        "classes": 2,
        "method": "full",
        "precision": "bf16",
        "checkpointing": "none",
        "rows": 16,
        "width": 128,
        "slots": None,
        "lengths": None,
        "micro_batches": 2,
    }
    h200 = (target(find("h200"), 100.0),)
    told = depths.take(ENCODER, [arguments], h200, LAYERS)[0][0]
    whole = depths.exactly(ENCODER, arguments, h200)[0]
    assert told.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.002)
    # One segment more or less: what is reserved is a staircase.
    assert told.peak_reserved == pytest.approx(whole.peak_reserved, abs=24 << 20)
    assert told.weights == whole.weights

    def kernels(taken: depths.Taken) -> float:
        found = rates(find("h200"), "bf16")
        assert found is not None
        return sum(w * seconds(d, found).kernels for w, d in taken.done)

    assert kernels(told) == pytest.approx(kernels(whole), rel=0.01)


def test_the_same_question_is_not_run_twice(folder: str, monkeypatch: pytest.MonkeyPatch):
    first = small(folder, gpu="h200")
    monkeypatch.setattr(depths, "ask", lambda _: pytest.fail("asked again"))
    assert small(folder, gpu="h200") == first


@pytest.mark.soak
def test_many_gpus_at_once_agree_with_one_at_a_time(folder: str):
    words = [f"model.name={json.dumps(folder)}", "model.method=full", "data.max_length=128"]
    some = [find(slug) for slug in ("h200", "t4", "4090")]
    rows = dict(plan_all(compose("nli", words), among=some))
    assert set(rows) == {spec.slug for spec in some}
    alone = small(folder, "optimization.compile=false", gpu="h200")
    among = rows[find("h200").slug]
    assert among.micro_batch_tokens == alone.micro_batch_tokens
    assert among.memory is not None
    assert alone.memory is not None
    # What kernels take for themselves is that of a GPU with somewhat more SMs.
    assert among.memory.peak_allocated_gib == pytest.approx(
        alone.memory.peak_allocated_gib, rel=0.02
    )


# ── without a child process ─────────────────────────────────────────────────────────────────────


def asked(**pins: Any) -> Question:
    work = Workload(lengths=(100,), sequences=1, max_length=100, effective_batch_size=16, epochs=1)
    return Question(
        task="nli",
        factory="a:b",
        arguments={},
        layers=1,
        workload=work,
        pins={name: Pin(value=value, origin="override") for name, value in pins.items()},
    )


def cpu_parts(question: Question) -> int:
    """Micro-batches of a step on a CPU, 64 sequences of which few are long."""
    lengths = (100, *[10] * 19) * 40
    work = replace(question.workload, lengths=lengths, sequences=800, effective_batch_size=64)
    profile = as_if(find("t4"))
    cpu = replace(profile, cpu=replace(profile.cpu, native_bf16=False), gpus=())
    fixed = planner.fixed_settings(replace(question, workload=work), cpu, 1)
    return fixed.cuttings[fixed.plain].cut.micro_batches


def test_a_cpu_that_drops_padding_cuts_a_step_as_little_as_it_can():
    assert cpu_parts(asked()) == cpu_parts(asked(batch_size=64)) == 1
    assert cpu_parts(asked(gradient_accumulation_steps=2)) == 2
    # What keeps its padding has the parts that pad the least.
    assert cpu_parts(asked(compile=True)) > 1
    assert cpu_parts(replace(asked(), unpackable="its own attention")) > 1


@given(
    batch=st.none() | st.integers(1, 64),
    steps=st.none() | st.integers(1, 8),
    ranks=st.integers(1, 8),
)
@settings(max_examples=60)
def test_the_effective_batch_is_the_product_where_it_is_not_given(
    batch: int | None, steps: int | None, ranks: int
):
    pins = {"batch_size": batch, "gradient_accumulation_steps": steps}
    chosen = decide.effective_batch(
        asked(**{k: v for k, v in pins.items() if v is not None}), ranks
    )
    assert chosen.value == (16 if batch is None else batch * (steps or 1) * ranks)


@pytest.mark.parametrize(
    ("asked_for", "origin", "gpu", "native", "chosen", "said"),
    [
        ("fp16", "preset conservative", None, False, "fp32", "this CPU does not multiply it"),
        ("bf16", "preset h200", None, False, "fp32", "this CPU does not multiply it"),
        ("bf16", "preset h200", None, True, "bf16", "preset h200"),
        ("fp16", "preset t4", "t4", False, "fp16", "preset t4"),
        ("bf16", "preset h200", "t4", False, "fp16", "compute capability 7.5 has none"),
        ("bf16", "override", "v100", True, "fp16", "you set it"),
        ("fp32", "override", None, False, "fp32", "you set it"),
    ],
)
def test_a_precision_that_the_device_lacks_falls_back_with_a_reason(
    asked_for: str, origin: str, gpu: str | None, native: bool, chosen: str, said: str
):
    profile = as_if(find(gpu or "t4"))
    cpu = replace(profile.cpu, native_bf16=native)
    profile = replace(profile, cpu=cpu, gpus=profile.gpus if gpu else ())
    pins = {"precision": Pin(value=asked_for, origin=origin)}
    found = decide.precision(replace(asked(), pins=pins), profile)
    assert found.value == chosen
    assert said in found.why
    assert (asked_for == chosen) or found.why.startswith(f"{asked_for} was asked for")


@pytest.mark.parametrize(
    ("gpu", "precise", "change", "attention", "said"),
    [
        ("a100", "bf16", {}, "varlen", "the flash kernel on packed rows"),
        ("a100", "bf16", {"window": 4}, "varlen", "the flash kernel on packed rows"),
        ("a100", "fp32", {}, "varlen_efficient", "needs half precision, not fp32"),
        ("t4", "fp16", {}, "varlen_efficient", "needs compute capability 8.0, and Tesla T4 has"),
        ("v100", "fp16", {}, "varlen_efficient", "memory-efficient kernel on packed rows"),
        ("t4", "fp16", {"window": 100}, "varlen_efficient", "memory-efficient kernel"),
        ("t4", "fp16", {"arguments": {"attention_dropout": 0.1}}, "sdpa", "attention dropout 0.1"),
        ("a100", "bf16", {"arguments": {"attention_dropout": 0.1}}, "varlen", "the flash kernel"),
        ("t4", "fp16", {"window": 99}, "sdpa", "no sliding window of 99 tokens to both sides"),
        ("a100", "fp16", {"packed_attention": "softcapped"}, "softcapped", "soft-capped logits"),
        ("a100", "bf16", {"packed_attention": "disentangled"}, "disentangled", "three terms"),
        ("t4", "fp16", {"packed_attention": "softcapped"}, "sdpa", "compute capability 8.0"),
        ("a100", "fp32", {"packed_attention": "disentangled"}, "sdpa", "needs half precision"),
        ("mi300x", "bf16", {}, "sdpa", "needs NVIDIA's kernels"),
    ],
)
def test_packed_rows_take_the_kernel_that_the_gpu_has(
    gpu: str, precise: Any, change: dict[str, Any], attention: str, said: str
):
    question = replace(asked(), **change)
    card = as_if(find(gpu)).gpu
    packed = decide.packing(question, card, precise)
    chosen = decide.attention_path(question, packed.value, card, precise)
    assert (packed.value, chosen.value) == (attention != "sdpa", attention)
    assert said in (chosen.why if packed.value else packed.why)


def big_product(gpu: str, measured: Measurements | None = None) -> float:
    work = Work(
        kind="product",
        flops=10**15,
        skipped=0,
        nbytes=1,
        half=True,
        aligned=True,
        backward=False,
        update=False,
    )
    found = rates(find(gpu), "bf16", measured=measured)
    assert found is not None
    return seconds([Done(work=work, times=1)], found).kernels


def test_twice_the_peak_halves_what_is_bound_by_it():
    fast, slow = find("h200"), find("a100-sxm4-80gb")
    assert fast.bf16_tflops is not None
    assert slow.bf16_tflops is not None
    assert big_product("a100-sxm4-80gb") / big_product("h200") == pytest.approx(
        fast.bf16_tflops / slow.bf16_tflops, rel=1e-3
    )


def test_a_gpu_that_was_measured_is_as_fast_as_it_was_measured_to_be():
    """The same share of its peak as where the steps were recorded: nothing changes."""

    def found(share: float) -> Measurements:
        peak = find("a100-sxm4-80gb").bf16_tflops
        assert peak is not None
        item = Measurement(
            name="matmul_bf16_sustained",
            unit="TFLOP/s",
            value=share * peak,
            samples=(),
            datasheet=peak,
        )
        return Measurements(device="a", torch="2", driver=None, taken="now", items=(item,))

    path = Path(__file__).parents[2] / "benchmarks/results/2026-11-15-check-h200.json"
    items = json.loads(path.read_text())["result"]["measured"]["items"]
    h200 = {item["name"]: item["value"] / (item["datasheet"] or 1) for item in items}
    alike = h200["matmul_bf16_sustained"]
    plain = big_product("a100-sxm4-80gb")
    assert big_product("a100-sxm4-80gb", found(alike)) == pytest.approx(plain, rel=1e-3)
    assert big_product("a100-sxm4-80gb", found(alike / 2)) == pytest.approx(2 * plain, rel=1e-3)


def test_a_gpu_without_a_peak_for_the_precision_has_no_time():
    assert rates(find("t4"), "bf16") is None


@pytest.mark.soak
def test_few_padded_micro_batches_where_a_gpu_waits_for_them(folder: str):
    """A small model on a large GPU: launching its kernels takes longer than all the padding."""
    words = ("model.use_flash_attention=false", "training.effective_batch_size=64")
    eager = (*words, "optimization.compile=false")
    lengths = [16, 32, 64, 128] * 64
    large = small(folder, *eager, gpu="h200", lengths=lengths)
    assert not large.packed
    assert large.gradient_accumulation_steps == 1
    assert large.micro_batch_tokens == 64 * 128
    # Where a step is nothing but arithmetic, padding is what costs.
    plain = ladder(lengths, 64, 64 * 128, padded=True)[0].micro_batches
    base = ("model.name=bert-base", "model.method=full", "data.max_length=128", *eager)
    assert plan("nli", *base, gpu="t4", lengths=lengths).gradient_accumulation_steps == plain > 1
    # A CPU computes nothing but attention on padding.
    assert small(folder, *eager, lengths=lengths).gradient_accumulation_steps == 1
    # By hand it is as it was asked for.
    assert small(folder, *eager, "training.batch_size=16", gpu="h200").batch_size == 16


def test_cuts_are_timed_by_their_tokens_and_their_number():
    """As many times the work as there are tokens, or as many launches as there are parts."""
    product = Work(
        kind="product",
        flops=10**13,
        skipped=0,
        nbytes=10**6,
        half=True,
        aligned=True,
        backward=False,
        update=False,
    )
    lengths = np.array([16, 32, 64, 128] * 64)
    cuts = (*coarser_cuts(lengths, 64, 64 * 128), *ladder(lengths, 64, 64 * 128, padded=True)[:1])
    cuttings = profile_cuts([lengths], cuts, 64, 1)
    speed = Speed(gpu=find("h200"), precision="bf16", tf32=True)

    def times(done: Done) -> list[float]:
        nothing = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 0.0)
        memory = nothing | dict.fromkeys(("workspace", "peak_allocated", "peak_reserved"), 0.0)
        taken = Taken(**memory, fits=True, done=((1.0, (done,)),))
        found = [speed.step_seconds(taken, cutting, cuttings[-1]) for cutting in cuttings]
        return [one for one in found if one is not None]

    bound = times(Done(work=product, times=1))
    assert bound == pytest.approx(
        [c.computed / cuttings[-1].computed * bound[-1] for c in cuttings]
    )
    waiting = times(Done(work=replace(product, kind="copy", flops=0, nbytes=8), times=1000))
    parts = [cutting.cut.micro_batches for cutting in cuttings]
    assert waiting == pytest.approx([n / parts[-1] * waiting[-1] for n in parts], rel=0.01)
    assert min(bound) == bound[-1]
    assert min(waiting) == waiting[0]


@pytest.mark.parametrize(
    ("name", "layers", "kernel"),
    [
        ("gemma-3-1b-it", 26, "varlen"),
        ("bert-base", 12, "varlen"),
        ("deberta-v3-base", 12, "disentangled"),
        ("gemma-2-2b", 26, "softcapped"),
    ],
)
def test_how_packed_rows_are_attended_to(name: str, layers: int, kernel: str):
    facts = model_facts(name)
    assert facts.layers == layers
    assert facts.unpackable is None
    assert facts.packed_attention == kernel
    assert facts.own_attention is (kernel == "disentangled")  # on GPUs that have no such kernel


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("deberta-v3-base", {"pos_att_type": ["c2p"]}, "own attention, and its scores have"),
        ("gemma-2-2b", {"head_dim": 96}, "heads of 96"),
        ("bert-base", {"hidden_size": 720}, "heads of 60"),
    ],
)
def test_what_cannot_be_packed_says_why(
    tmp_path: Path, name: str, change: dict[str, Any], reason: str
):
    config = model_shape(name).config | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = model_facts(str(tmp_path))
    assert reason in str(facts.unpackable)
    assert facts.own_attention is (name == "deberta-v3-base")


def test_sequences_beyond_the_distances_of_a_deberta_are_padded():
    words = ["model.name=deberta-v3-base", "data.max_length=1024"]
    long, short = (question(compose("nli", words[:n]), [400] * 64) for n in (2, 1))
    assert long.unpackable == (
        "deberta-v3-base has its own attention, and sequences of 1024 tokens are longer than its "
        "512 distances"
    )
    gpu = as_if(find("a800-sxm4-80gb")).gpu
    assert not decide.packing(long, gpu, "bf16").value
    assert decide.packing(short, gpu, "bf16").value


def test_the_path_of_a_model_does_not_decide_its_attention():
    named = replace(asked(), unpackable="my own attention/bert has heads of 60")
    assert decide.attention_path(named, False, None).value == "sdpa"
    own = replace(asked(), unpackable="no kernel takes it", own_attention=True)
    assert decide.attention_path(own, False, None).value == "own"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no model_type"),
        ('{"model_type": "bert"}', "has no num_hidden_layers"),
        ("[1]", "is not an object"),
        ("{", "cannot read config.json"),
    ],
)
def test_a_config_that_lacks_something_is_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match=message):
        model_facts(str(tmp_path))


def test_a_folder_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match=r"no config\.json"):
        model_facts(str(tmp_path))


def test_a_model_of_the_other_kind_is_refused():
    with pytest.raises(BadInput, match="bert-base is no model for gpt"):
        question(compose("gpt", ["model.name=bert-base"]))
    with pytest.raises(BadInput, match="gpt-small is no model for nli"):
        question(compose("nli", ["model.name=gpt-small"]))


def test_assumed_lengths_are_those_of_the_documents():
    pairs = assumed_lengths("nli", 10**6)
    assert pairs.size == 13_356
    assert 294.7 < pairs.mean() / 1.3 < 400  # a post of 294.7 words, and a criterion
    assert assumed_lengths("nli", 512).max() == 512
    assert set(assumed_lengths("gpt", 1024).tolist()) == {1024}


@pytest.mark.parametrize("lengths", [[], [5, 0]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int]):
    with pytest.raises(BadInput, match="lengths, the least of them"):
        plan("nli", gpu="t4", lengths=lengths)


def test_accumulation_that_cannot_hold_the_batch_is_refused():
    words = ("training.batch_size=1", "training.effective_batch_size=64")
    with pytest.raises(BadInput, match="do not fit 2 micro-batches of 1 × 512"):
        plan("nli", *words, "optimization.gradient_accumulation_steps=2", gpu="t4")


@pytest.mark.soak
def test_what_one_gpu_cannot_hold_is_spread_over_two(folder: str):
    words = (f"model.name={json.dumps(folder)}", "model.method=full", "data.max_length=128")
    h200, asked_of = as_if(find("h200")), question(compose("nli", words))
    alone = planner.plan(asked_of, h200, memory_gib=0.05)
    assert (alone.fits, alone.sharding) == (False, "none")
    assert alone.memory is not None
    # Short by half the margin: the half of weights and state that another rank holds will do.
    gib = alone.memory.peak_allocated_gib * (1 + MARGIN / 2)
    one = planner.plan(asked_of, h200, memory_gib=gib)
    assert count_savers(one) or not one.fits
    shared = planner.plan(asked_of, h200, memory_gib=gib, ranks=2)
    assert (shared.fits, shared.sharding) == (True, "fsdp")
    assert shared.memory is not None
    assert shared.memory.weights_gib * GIB == pytest.approx(2 * parameters(), rel=0.01)
    assert shared.memory.optimizer_gib * GIB == pytest.approx(4 * parameters(), rel=0.01)
    assert shared.memory.peak_allocated_gib < shared.memory.capacity_gib == pytest.approx(gib)
    assert "sharding" in {reason.setting for reason in shared.reasons}
