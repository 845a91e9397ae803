"""`train gpt` from token files to a model that writes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt_tiny import be_quick, gpt_words, rows_of, write_tokens
from trainfit.cli.main import run
from trainfit.conf import compose
from trainfit.core.errors import BadInput
from trainfit.core.plan_records import Plan
from trainfit.core.records import HardwareProfile
from trainfit.data.token_files import open_tokens
from trainfit.engine.observers import Observer
from trainfit.jobs import gpt as preparation
from trainfit.jobs.gpt import build, draw, open_writer, shape_of, train
from trainfit.jobs.models.gpt_model import Gpt, GptShape
from trainfit.jobs.plan_choices import CHUNK, FINE_CHUNK, choose_gpt
from trainfit.jobs.pretraining import GptTask, collate_blocks
from trainfit.jobs.run import Show
from trainfit.packing import cut_step, ladder
from trainfit.planning import planner

SMALL = GptShape(vocab_size=61, block_size=8, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def task(tokens: int = 1000, effective: int = 4, block: int = 8, **more: Any) -> GptTask:
    ids = np.arange(tokens, dtype=np.uint16) % 61
    return GptTask(
        lambda: Gpt(SMALL), ids, ids[:200], block_size=block, effective_batch=effective, **more
    )


# ── blocks ────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30)
@given(
    tokens=st.integers(20, 3000),
    block=st.integers(1, 9),
    effective=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_an_epoch_deals_every_block_at_most_once(
    tokens: int, block: int, effective: int, seed: int
):
    one = task(tokens, effective, block, seed=seed)
    blocks = (tokens - 1) // block
    assert len(one.lengths()) == blocks
    assert set(one.lengths()) == {block}
    steps = [list(map(int, step)) for step in one.steps(0)]
    dealt = [number for step in steps for number in step]
    assert len(set(dealt)) == len(dealt)
    assert blocks - len(dealt) < min(effective, blocks)  # less than a step is left over
    assert {len(step) for step in steps} == {min(effective, blocks)}
    again = task(tokens, effective, block, seed=seed)
    assert np.array_equal(again.steps(3), one.steps(3))


def test_epochs_and_seeds_shuffle_differently():
    one = task()
    assert not np.array_equal(one.steps(0), one.steps(1))
    assert not np.array_equal(one.steps(0), task(seed=1).steps(0))


def test_a_block_is_predicted_one_token_on():
    ids = np.arange(100, dtype=np.uint16)
    batch = collate_blocks(ids, [0, 3], 3, 8)
    assert batch["input_ids"][0].tolist() == list(range(8))
    assert batch["targets"][0].tolist() == list(range(1, 9))
    assert batch["input_ids"][1].tolist() == list(range(24, 32))
    assert batch["targets"][1].tolist() == list(range(25, 33))
    assert batch["targets"][2].tolist() == [-100] * 8  # filler
    last = (100 - 1) // 8 - 1
    assert collate_blocks(ids, [last], 1, 8)["targets"][0, -1] == 8 * (last + 1)


def test_ranks_share_the_same_step():
    one = task(effective=12)
    lengths = np.asarray(one.lengths())
    for ranks in (1, 2, 3, 4):
        [cut, *_] = ladder(lengths[:12], 12, 2 * 8, padded=True, ranks=ranks)
        for step in list(one.steps(0))[:5]:
            parts = cut_step(lengths, step, cut, ranks)
            seen = [s for part in parts for batch in part for s in batch.sequences]
            assert sorted(seen) == sorted(map(int, step))


def test_filler_counts_nothing():
    torch.manual_seed(0)
    model, one = Gpt(SMALL), task()
    whole = one.loss(model, one.collate([1, 2], 2, 8, None))
    filled = one.loss(model, one.collate([1, 2], 4, 8, None))
    torch.testing.assert_close(filled, whole)
    assert one.loss(model, one.collate([], 1, 8, None)) == 0


def test_the_evaluation_is_the_mean_over_its_blocks():
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    ids = np.arange(1000, dtype=np.uint16) % 61
    logits = model(torch.from_numpy(ids[:192].astype(np.int64)).reshape(24, 8)).flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(ids[1:193].astype(np.int64))
    )
    with torch.no_grad():
        for size in (1, 5, 24):
            found = task().evaluate(model, size)["val_loss"]
            assert found == pytest.approx(wanted.item(), rel=1e-5)
        few = task(evaluated=5).evaluate(model, 2)["val_loss"]
    assert few != pytest.approx(wanted.item(), rel=1e-5)


def test_too_little_data_is_refused():
    with pytest.raises(BadInput, match=r"training part has 8 tokens, fewer than a block of 8"):
        task(8)


# ── the job ───────────────────────────────────────────────────────────────────────────────────


def end_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_learns_and_ends_with_one_object(tmp_path: Path, capsys: Any):
    words = gpt_words(tmp_path, "training.max_steps=60", "training.eval_steps=20")
    assert run(["train", "gpt", *words, "--json"]) == 0
    captured = capsys.readouterr()
    [line] = captured.out.splitlines()
    data = json.loads(line)
    assert data["steps"] == 60
    assert data["val_loss"] < data["unigram_entropy"] - 0.5
    assert data["train_loss"] < data["unigram_entropy"]
    assert data["mfu"] is None  # nobody knows the peak of a CPU
    assert data["tokens_per_second"] > 0
    assert data["peak_memory_gib"] > 0
    assert data["events"] == []
    folder = Path(data["run"])
    evaluations = rows_of(folder, "evaluation")
    assert [row["step"] for row in evaluations] == [20, 40, 60]
    assert data["val_loss"] == min(row["val_loss"] for row in evaluations)
    told = json.loads((folder / "results.json").read_text())
    assert told == {name: value for name, value in data.items() if name != "version"}
    # The loss and the entropy stand side by side.
    assert f"val_loss {evaluations[0]['val_loss']:.4f}, unigram_entropy" in captured.err


def test_the_log_has_the_guides_lines(tmp_path: Path, capsys: Any):
    assert run(["train", "gpt", *gpt_words(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    folder = Path(json.loads(captured.out)["run"])
    line = r"iter {}: loss \d+\.\d{{4}}, time \d+\.\d\dms"
    log = (folder / "train.log").read_text()
    for step in (2, 4, 6):
        assert re.search(line.format(step) + r"$", captured.err, re.MULTILINE)
        assert re.search(line.format(step) + r"$", log, re.MULTILINE)
    rows = rows_of(folder, "train")
    shown = [float(text) for text in re.findall(r"time ([\d.]+)ms", log)]
    assert shown == pytest.approx([1e3 * row["compute_seconds"] for row in rows], abs=0.006)


def test_the_page_says_where_it_stands(tmp_path: Path, capsys: Any):
    assert run(["train", "gpt", *gpt_words(tmp_path)]) == 0
    captured = capsys.readouterr()
    for words in ("nats per token", "waiting for data", "trainfit sample"):
        assert words in captured.out
    for words in ("unigram entropy", "Global batch 4 (64 tokens a step)", "Device: cpu"):
        assert words in captured.err


def test_the_first_and_the_resumed_run_end_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Stop(Observer):
        def on_step(self, step: int) -> None:
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    more = ("training.max_steps=12", "model.dropout=0.1", "training.checkpoint_steps=100")
    composed = compose("gpt", gpt_words(tmp_path, *more))
    whole = train(composed)
    stopped = train(composed, Show(watch=lambda _: (Stop(),)))
    assert (stopped.status, stopped.steps) == ("stopped", 8)
    # One that is not finished writes too, from its checkpoint.
    assert open_writer(Path(stopped.run)).write("def ", tokens=5).startswith("def ")
    resumed = train(composed, resume=Path(stopped.run))
    assert resumed.status == "finished"
    assert resumed.val_loss == whole.val_loss
    assert resumed.train_loss == pytest.approx(whole.train_loss)
    first, second = (
        load_file(Path(r.run) / "export" / "model.safetensors") for r in (whole, resumed)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [event.kind for event in resumed.events] == ["stopped", "resumed"]


def test_resume_on_other_data_is_refused(tmp_path: Path):
    composed = compose("gpt", gpt_words(tmp_path))
    done = train(composed)
    other = write_tokens(tmp_path / "other", seed=8)
    moved = compose("gpt", [*gpt_words(tmp_path), f"data.data_dir={other}"])
    with pytest.raises(BadInput, match="not what"):
        train(moved, resume=Path(done.run))


def test_dry_run_and_the_command_line_resume(tmp_path: Path, capsys: Any):
    assert run(["train", "gpt", *gpt_words(tmp_path), "--dry-run", "--json"]) == 0
    data = end_of(capsys)
    assert data["plan"]["effective_batch_size"] == 4
    assert not (tmp_path / "runs").exists()
    assert run(["train", "gpt", *gpt_words(tmp_path), "--json"]) == 0
    first = end_of(capsys)
    assert run(["train", "gpt", "--resume", first["run"], "--json"]) == 0
    assert end_of(capsys)["val_loss"] == first["val_loss"]


def test_the_vocabulary_comes_from_the_data(tmp_path: Path):
    composed = compose("gpt", gpt_words(tmp_path))
    made = preparation.prepare(composed)
    assert made.data.header.vocab_size == 300
    assert shape_of(made.config).vocab_size == 320  # a multiple of 64
    small = compose("gpt", gpt_words(tmp_path, "model.vocab_size=200"))
    with pytest.raises(BadInput, match=r"model\.vocab_size is 200"):
        preparation.prepare(small)


def test_any_size_by_override(tmp_path: Path):
    more = ("model.n_layer=3", "model.n_head=2", "model.n_embd=48", "training.max_steps=1")
    done = train(compose("gpt", gpt_words(tmp_path, *more)))
    config = json.loads((Path(done.run) / "export" / "config.json").read_text())
    assert [config[name] for name in ("n_layer", "n_head", "n_embd", "n_positions")] == [
        3,
        2,
        48,
        16,
    ]


# ── the model that comes of it ────────────────────────────────────────────────────────────────


def test_the_export_is_a_gpt2_with_the_same_logits(tmp_path: Path):
    composed = compose("gpt", gpt_words(tmp_path))
    done = train(composed)
    folder = Path(done.run)
    other = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    ours = build(preparation.prepare(composed).config, Plan.load(folder / "plan.json"))
    from trainfit.engine import checkpoint

    checkpoint.load_weights(folder, ours)
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other(ids).logits, ours.eval()(ids), rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    text = "def alder(birch):\n    return birch"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|endoftext|>"
    drawn = other.generate(torch.tensor([[0]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    writer = open_writer(folder)
    mine = draw(writer.model, [0], known=320, temperature=0)
    assert drawn[0, 1:].tolist() == [next(mine) for _ in range(4)]


def test_sample_writes_what_it_learned(tmp_path: Path, capsys: Any):
    words = gpt_words(tmp_path, "training.max_steps=150", "training.eval_steps=150")
    assert run(["train", "gpt", *words, "--json"]) == 0
    folder = end_of(capsys)["run"]
    sample = ["sample", folder, "--prompt", "def ", "--tokens", "40"]
    assert run([*sample, "--seed", "1"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert "return" in first
    assert run([*sample, "--seed", "1"]) == 0
    assert capsys.readouterr().out == first
    assert run([*sample, "--seed", "2", "--temperature", "1.5"]) == 0
    assert capsys.readouterr().out != first
    assert run([*sample, "--temperature", "0", "--json"]) == 0
    greedy = end_of(capsys)["text"]
    assert run([*sample, "--top-k", "1", "--seed", "9", "--json"]) == 0
    assert end_of(capsys)["text"] == greedy
    assert run(["sample", folder, "--tokens", "12"]) == 0  # a document from its beginning
    assert len(capsys.readouterr().out) > 1
    assert run([*sample[:2], "--prompt", "\udcff"]) == 2  # a byte of a shell that is no UTF-8
    assert "the prompt: half of a surrogate pair" in capsys.readouterr().err


def test_top_k_and_the_vocabulary_bound_what_is_drawn():
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    with torch.no_grad():
        best = model(torch.tensor([[3]]))[0, -1, :40].topk(3).indices.tolist()
    drawn = {
        next(draw(model, [3], known=40, top_k=3, temperature=5.0, seed=seed)) for seed in range(60)
    }
    assert drawn == set(best)
    stream = draw(model, [1], known=10, top_k=None, temperature=9.0)
    assert max(next(stream) for _ in range(50)) < 10


def test_sample_refuses_what_is_no_gpt_run(tmp_path: Path, capsys: Any):
    assert run(["sample", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err


# ── loss by chunks ────────────────────────────────────────────────────────────────────────────


def test_chunks_are_chosen_on_a_gpu_and_where_logits_do_not_fit(tmp_path: Path):
    from dataclasses import replace

    from trainfit.hardware import detect
    from trainfit.jobs import job_plan

    composed = compose("gpt", gpt_words(tmp_path))
    question = job_plan.question(composed)
    asked: list[Any] = []
    profile = detect()
    plans: dict[Any, Plan] = {}

    def make(fits: bool, mode: str, finer: str) -> Any:
        def plan(one: Any) -> Plan:
            chunk = one.arguments.get("loss_chunk")
            asked.append(chunk)
            if chunk not in plans:
                plans[chunk] = planner.plan(one, profile)
            fine = chunk == FINE_CHUNK
            mode_now = finer if fine else mode
            return replace(plans[chunk], fits=fits or fine, gradient_checkpointing=mode_now)

        return plan

    def chosen(plan: Plan) -> tuple[Any, str]:
        [reason] = [reason for reason in plan.reasons if reason.setting == "loss_chunk"]
        assert reason.value == plan.task.arguments.get("loss_chunk")
        return reason.value, reason.why

    plain = choose_gpt(composed, question, make(True, "none", "none"), gpu=False)
    assert asked == [None]
    assert chosen(plain)[0] is None
    fast = choose_gpt(composed, question, make(True, "none", "none"), gpu=True)
    assert asked == [None, CHUNK]
    assert chosen(fast)[0] == CHUNK
    for gpu in (False, True):
        tight = choose_gpt(composed, question, make(False, "full", "full"), gpu=gpu)
        assert chosen(tight)[0] == FINE_CHUNK
        assert "does not fit" in chosen(tight)[1]
        twice = choose_gpt(composed, question, make(True, "full", "none"), gpu=gpu)
        assert chosen(twice)[0] == FINE_CHUNK
        no_gain = choose_gpt(composed, question, make(True, "full", "full"), gpu=gpu)
        assert chosen(no_gain)[0] == (CHUNK if gpu else None)
    pinned = compose("gpt", gpt_words(tmp_path, "model.loss_chunk=24"))
    kept = choose_gpt(pinned, job_plan.question(pinned), make(True, "none", "none"), gpu=True)
    assert chosen(kept) == (24, "you set it")


@pytest.mark.parametrize(
    ("precision", "word", "dtype"),
    [
        ("bf16", "auto", torch.bfloat16),
        ("fp16", "auto", torch.float32),
        ("fp16", "true", torch.float16),
        ("bf16", "false", torch.float32),
    ],
)
def test_what_blocks_hand_on_is_in_half_precision_with_bf16(
    tmp_path: Path, precision: Any, word: str, dtype: torch.dtype
):
    """On tensors without values: not every CPU computes products in half precision."""
    from dataclasses import replace

    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainfit.jobs import job_plan
    from trainfit.jobs.gpt import build

    composed = compose(
        "gpt", gpt_words(tmp_path, f"model.half_stream={word}", "model.vocab_size=64")
    )
    plan = replace(job_plan.plan("gpt", *gpt_words(tmp_path)), precision=precision)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    seen = []
    with FakeTensorMode(), torch.autocast("cpu", half):
        model = build(composed.config, plan)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _block, given: seen.append(given[0].dtype))
        ids = torch.zeros(1, composed.config.data.max_length, dtype=torch.int64)
        model(ids, ids)
    assert set(seen) == {dtype}


def test_chunks_train_to_the_same_weights(tmp_path: Path):
    runs = [
        train(compose("gpt", gpt_words(tmp_path, f"model.loss_chunk={chunk}")))
        for chunk in ("null", "24")
    ]
    whole, chunked = (load_file(Path(r.run) / "export" / "model.safetensors") for r in runs)
    for name, weight in whole.items():
        torch.testing.assert_close(chunked[name], weight, rtol=1e-3, atol=1e-5)
    assert "24 tokens at a time" in (Path(runs[1].run) / "train.log").read_text()


def test_the_embedded_corpus_is_what_trains_without_data(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    from trainfit.data import token_preparation

    write_tokens(tmp_path / "tokens")
    few = sorted((tmp_path / "tokens-texts").iterdir())
    monkeypatch.setattr(token_preparation, "standard_library", lambda: few)
    words = ["training.max_steps=2", "data.vocab_size=300", f"runs_dir={tmp_path / 'runs'}"]
    assert run(["train", "gpt", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert "experiment=gpt_embedded" in captured.err
    folder = Path(json.loads(captured.out)["run"])
    config = json.loads((folder / "config.json").read_text())["config"]
    assert config["model"]["name"] == "gpt-tiny"
    assert json.loads((folder / "data.json").read_text())["header"]["train"]["documents"] > 40
    assert HardwareProfile.load(folder / "hardware.json").cpu.cores >= 1


def test_token_files_of_nanogpt_train_too(tmp_path: Path, capsys: Any):
    folder = tmp_path / "nano"
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, 65, 3000).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    ids[:400].tofile(folder / "val.bin")
    (folder / "meta.json").write_text('{"vocab_size": 65}')
    words = ["train", "gpt", *gpt_words(tmp_path), f"data.data_dir={folder}"]
    assert run([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    done = json.loads(out)
    assert done["val_loss"] is not None
    assert open_tokens(folder).unigram_entropy == pytest.approx(done["unigram_entropy"])
    assert "trainfit sample" not in err
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        open_writer(Path(done["run"]))
