"""Scripts with Trainer and sentence-transformers, with and without trainfit, in turns.

Models have the real shapes and random weights, batches of 32, bf16. Lengths are ReDSM5's, and each
batch is padded to its longest text; `bert-512` pads texts of 120 tokens on average to 512;
`cross-encoder` is a loop over a CrossEncoder of sentence-transformers under Accelerate. Each run is
a fresh model and trainer: steps per second come from the steps after the warm-up, in which blocks
are compiled and graphs captured. Arms alternate and add one change each: unpadding alone, graphs
(with batches fetched and sent ahead), compiled blocks in the graphs. After the rounds of the cases
of --exact, the losses of all arms are compared with those of the plain script, in float32 with
dropout off; that is compiled anew, which takes as long as the rounds.

python benchmarks/unpadded.py --out FILE [--only bert bert-512 cross-encoder modernbert deberta]
    [--arms plain unpadded graphs compiled] [--exact bert] [--rounds 2] [--seconds 300] [--tiny]

--arms also knows plain-compiled and unpadded-compiled, which torch compiles. Cases run in a child
process, and in a new one after a case that failed or ran out of its share of --seconds. Each result
is a line, and FILE is written after each. --tiny shows on a CPU that all works.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

CASES = {
    "bert": ("bert-base", "longest"),
    "bert-512": ("bert-base", "512"),
    "cross-encoder": ("bert-base", "longest"),
    "modernbert": ("modernbert-base", "longest"),
    "deberta": ("deberta-v3-base", "longest"),
}
"""Model and padding of each script; those of one model share its compiled code."""
ARMS = {
    "plain": (),
    "unpadded": ("unpadded", "fused"),
    "graphs": ("unpadded", "graphs", "ahead", "nowait", "fused"),
    "compiled": ("unpadded", "graphs", "compile", "ahead", "nowait", "fused"),
    "plain-compiled": (),
    "unpadded-compiled": ("unpadded", "fused"),
}
"""Changes of each arm."""
LADDER = ("plain", "unpadded", "graphs", "compiled")
"""Arms of which each adds a change to the one before."""
LONGEST = 512
EXACT_STEPS = 8
ROW = "row: "
"""Begins the lines that a child has for its parent; Trainer prints others."""
TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TINY_MODERN = {
    "layer_types": ["sliding_attention", "full_attention"],
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}


# ── the parent ────────────────────────────────────────────────────────────────────────────────


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(LADDER))
    parser.add_argument("--exact", nargs="*", choices=tuple(CASES), default=["bert"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.warm_up, given.batch, given.rounds = 4, 3, 4, 1
        given.exact = list(CASES)
    if not given.child and given.out is None:
        parser.error("--out is required")
    return given


def main() -> None:
    given = asked()
    if given.child:
        for case in given.only:
            run_case(case, given)
        return
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/unpadded.py", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": [],
    }
    ends = time.monotonic() + given.seconds
    left = list(given.only)
    while left:
        left = run_child(left, given, record, ends)
    record["summary"] = summary(record["rows"])
    save(given.out, record)
    for line in record["summary"]:
        print(json.dumps(line), flush=True)


def run_child(
    cases: list[str], given: argparse.Namespace, record: dict[str, Any], ends: float
) -> list[str]:
    """Run cases in a child until it ends, or a case takes too long; return those left."""
    words = [word for word in sys.argv[1:] if word not in (*CASES, "--only", "--exact")]
    command = [sys.executable, __file__, *words, "--child", "--only", *cases]
    command += ["--exact", *given.exact]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    waiting = list(cases)
    while waiting:
        share = max(20.0, (ends - time.monotonic()) / len(waiting))
        limit = time.monotonic() + share * (1.0 if len(waiting) == 1 else 2.0)
        error = _follow(waiting[0], lines, limit, given.out, record)
        case = waiting.pop(0)
        if error is not None:
            add(given.out, record, {"case": case, "error": error})
            break
    child.kill()
    child.wait()
    return waiting


def _read(child: Any, lines: queue.Queue[str | None]) -> None:
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _follow(
    case: str, lines: queue.Queue[str | None], limit: float, out: Path, record: dict[str, Any]
) -> str | None:
    """Take the rows of one case as they come; return why it ended early."""
    while True:
        try:
            line = lines.get(timeout=max(0.1, limit - time.monotonic()))
        except queue.Empty:
            return "it ran out of its time"
        if line is None:
            return "its process ended"
        if not line.startswith(ROW):
            continue
        row = json.loads(line.removeprefix(ROW))
        if row.get("ended") == case:
            return None
        if "versions" in row:
            record |= row
        else:
            add(out, record, row)


def add(out: Path, record: dict[str, Any], row: dict[str, Any]) -> None:
    """Print a result and write it down."""
    record["rows"].append(row)
    record["summary"] = summary(record["rows"])
    save(out, record)
    print(json.dumps({key: value for key, value in row.items() if key != "losses"}), flush=True)


def save(out: Path, record: dict[str, Any]) -> None:
    """Write the record of this call after those of earlier ones."""
    earlier = json.loads(out.read_text())["records"] if out.exists() else []
    earlier = [one for one in earlier if one["began"] != record["began"]]
    out.write_text(json.dumps({"records": [*earlier, record]}, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case and arm: its speed beside plain and the arm before, and how losses differ."""
    lines = []
    timed = [row for row in rows if "steps_per_second" in row]
    for case, arm in dict.fromkeys((row["case"], row["arm"]) for row in timed):
        speed = _speed(timed, case, arm)
        plain = _speed(timed, case, "plain")
        line: dict[str, Any] = {"case": case, "arm": arm, "steps_per_second": speed}
        if plain is not None and speed is not None:
            line["times"] = round(speed / plain, 3)
        before = LADDER[max(0, LADDER.index(arm) - 1)] if arm in LADDER else "plain"
        last = _speed(timed, case, before)
        if last is not None and speed is not None and before != arm:
            line["adds"] = round(speed / last, 3)
        for row in rows:
            if (row["case"], row.get("arm")) == (case, arm) and "largest_difference" in row:
                line["largest_difference"] = row["largest_difference"]
        lines.append(line)
    return lines


def _speed(rows: list[dict[str, Any]], case: str, arm: str) -> float | None:
    found = [row["steps_per_second"] for row in rows if (row["case"], row["arm"]) == (case, arm)]
    return median(found) if found else None


# ── the child ─────────────────────────────────────────────────────────────────────────────────


def tell(row: dict[str, Any]) -> None:
    print(ROW + json.dumps(row), flush=True)


def run_case(case: str, given: argparse.Namespace) -> None:
    """Run all arms of a case, in turns, and compare their losses once."""
    import torch

    from trainfit.runtime import forget_compiled

    tell({"device": device(), "versions": versions()})
    if _BUILT and CASES[next(iter(_BUILT))[0]][0] != CASES[case][0]:
        forget_compiled()  # torch compiles a function a few times only
    runs = [(round_, arm) for round_ in range(given.rounds) for arm in given.arms]
    for round_, arm in runs:
        told = {"case": case, "arm": arm, "round": round_}
        try:
            found = train(case, arm, given, exact=False)
        except Exception as error:  # noqa: BLE001 a failed run is a row too
            tell(told | {"error": f"{type(error).__name__}: {error}"[:500]})
            if "CUDA error" in str(error):
                os._exit(1)  # nothing on this GPU works in this process from here
        else:
            tell(told | found)
        gc.collect()  # graphs and their model hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if case in given.exact:
        compare(case, given)
    tell({"ended": case})


def compare(case: str, given: argparse.Namespace) -> None:
    """Compare the losses of each arm with those of the plain script."""
    try:
        wanted = train(case, "plain", given, exact=True)["losses"]
        for arm in [arm for arm in given.arms if arm != "plain"]:
            found = train(case, arm, given, exact=True)
            both = list(zip(found["losses"], wanted, strict=True))
            most = max(abs(one - other) for one, other in both)
            tell(found | {"case": case, "arm": arm, "largest_difference": most, "losses": both})
    except Exception as error:  # noqa: BLE001
        tell({"case": case, "arm": "exact", "error": f"{type(error).__name__}: {error}"[:500]})


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("trainfit", "torch", "transformers", "accelerate", "sentence-transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def config_of(case: str, *, tiny: bool, dropout: bool, **more: Any) -> Any:
    from trainfit.hardware.model_shapes import model_shape, transformers_config

    small: dict[str, Any] = {}
    if tiny:
        small = TINY | (TINY_MODERN if case == "modernbert" else {})
    config = transformers_config(model_shape(CASES[case][0]), **small, **more)
    for field in () if dropout else [one for one in vars(config) if "dropout" in one]:
        setattr(config, field, 0.0)
    return config


def lengths_of(case: str, given: argparse.Namespace, steps: int, *, exact: bool) -> list[int]:
    """Lengths of the texts of all steps; the last ones, which are timed, are those of every arm.

    If `exact`, every other batch has the same lengths, so that graphs are replayed soon.
    """
    drawn = draw_lengths(case, given.batch * (given.warm_up + given.steps), tiny=given.tiny)
    if exact:
        return drawn[: 2 * given.batch] * (steps // 2)
    return drawn[-given.batch * steps :]


def draw_lengths(case: str, count: int, *, tiny: bool) -> list[int]:
    """Draw lengths of ReDSM5's pairs, or log-normal ones of 120 tokens on average."""
    import numpy as np

    from trainfit.jobs.job_plan import assumed_lengths

    draws = np.random.default_rng(0)
    if tiny:
        return draws.integers(4, 40, count).tolist()
    if CASES[case][1] == "longest":
        return draws.choice(assumed_lengths("nli", LONGEST), count).tolist()
    drawn = np.exp(np.log(120) - 0.8**2 / 2 + 0.8 * draws.standard_normal(count))
    return np.clip(np.round(drawn), 8, LONGEST).astype(int).tolist()


class Collate:
    """Pads to the longest text of the batch, or to a fixed width."""

    def __init__(self, padding: str, pad: int) -> None:
        self.width = None if padding == "longest" else int(padding)
        self.pad = pad
        self.real: list[int] = []
        self.padded: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        width = self.width or max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            size = len(row["input_ids"])
            ids[at, :size] = torch.tensor(row["input_ids"])
            mask[at, :size] = 1
        self.real.append(int(mask.sum()))
        self.padded.append(mask.numel())
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Clock:
    """Times the steps after the warm-up, with the GPU's work done at both ends.

    A step in which a new size is captured counts as long as the others: a training of usual length
    has few of them. `captures` tells how many there were, and `seconds_with` the time with them.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.last, self.step = warm_up, warm_up + steps, 0
        self.model: Any = None
        self.graphs: list[Any] | None = None
        self.ends: list[float] = []
        self.others: list[int] = []

    def stepped(self) -> None:
        import torch

        from trainfit.integrations.speeding import facts_in

        self.step += 1
        if self.step < self.warm_up:
            return
        if self.step in (self.warm_up, self.last) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.graphs is None:
            found = [facts.graphs for facts in facts_in(self.model)]
            self.graphs = [one for one in found if one is not None]
        self.ends.append(time.perf_counter())
        self.others.append(sum(one.eager + one.captured for one in self.graphs))

    def figures(self, batch: int) -> dict[str, Any]:
        """Speed of the timed steps."""
        spans = [after - before for before, after in itertools.pairwise(self.ends)]
        other = [after != before for before, after in itertools.pairwise(self.others)]
        usual = median([span for span, is_other in zip(spans, other, strict=True) if not is_other])
        total = sum(
            usual if is_other else span for span, is_other in zip(spans, other, strict=True)
        )
        return {
            "steps_per_second": len(spans) / total,
            "samples_per_second": batch * len(spans) / total,
            "captures": sum(other),
            "seconds_with": sum(spans),
        }


def train(case: str, arm: str, given: argparse.Namespace, *, exact: bool) -> dict[str, Any]:
    """Run one training; return its speed, or its losses if `exact`."""
    import torch
    from transformers import set_seed

    from trainfit.integrations.host_batches import AROUND
    from trainfit.integrations.speeding import facts_in

    set_seed(0)
    steps = EXACT_STEPS if exact else given.steps
    brief = arm in ("plain", "unpadded")  # they capture and compile nothing
    warm_up = min(10, given.warm_up) if brief else given.warm_up
    AROUND.off = "ahead" not in ARMS[arm]  # an earlier arm in this process has set it up
    clock = Clock(0 if exact else warm_up, steps)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    script = train_cross_encoder if case == "cross-encoder" else train_classifier
    model, losses, more = script(case, arm, given, clock, exact)
    found: dict[str, Any] = {"seconds": time.perf_counter() - began} | more
    for facts in facts_in(model):
        found |= {
            "packed": facts.tally.packed,
            "own_way": facts.tally.own_way,
            "said": sorted(facts.tally.said),
        }
        if facts.graphs is not None:
            found |= {
                "replayed": facts.graphs.replayed,
                "eager": facts.graphs.eager,
                "captured": facts.graphs.captured,
                "obstacle": facts.graphs.obstacle,
            }
            if facts.graphs.blocks is not None:
                found["uncompiled"] = facts.graphs.blocks.obstacle
    if exact:
        return found | {"losses": losses}
    found |= clock.figures(given.batch)
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


_BUILT: dict[Any, Any] = {}
"""The last model that was built: drawing weights takes longer than copying them."""


def built(key: Any, build: Any) -> Any:
    import copy

    if key not in _BUILT:
        _BUILT.clear()
        _BUILT[key] = build()
    return copy.deepcopy(_BUILT[key])


def train_classifier(
    case: str, arm: str, given: argparse.Namespace, clock: Clock, exact: bool
) -> tuple[Any, list[float], dict[str, Any]]:
    """Train as a plain script with Trainer does."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import trainfit

    class Timed(TrainerCallback):
        def on_step_end(self, *_: Any, **_rest: Any) -> None:
            clock.stepped()

    config = config_of(case, tiny=given.tiny, dropout=not exact, num_labels=3)
    build = AutoModelForSequenceClassification.from_config
    model = built((case, exact), lambda: build(config))
    draw = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(5, config.vocab_size, (size,), generator=draw).tolist()}
        | {"labels": at % 3}
        for at, size in enumerate(lengths_of(case, given, clock.last, exact=exact))
    ]
    collate = Collate(CASES[case][1], config.pad_token_id or 0)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=given.batch,
                max_steps=clock.last,
                learning_rate=2e-5,
                bf16=cuda and not exact,
                torch_compile=arm.endswith("-compiled"),
                logging_steps=1 if exact else 10_000,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=0,
                train_sampling_strategy="sequential",
            ),
            train_dataset=rows,
            data_collator=collate,
            callbacks=[Timed()],
        )
        clock.model = model
        if ARMS[arm]:
            trainfit.speed_up(trainer, only=ARMS[arm], quiet=True)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    tokens = {"real_tokens": mean(collate.real), "padded_tokens": mean(collate.padded)}
    return model, losses, tokens


def train_cross_encoder(
    case: str, arm: str, given: argparse.Namespace, clock: Clock, exact: bool
) -> tuple[Any, list[float], dict[str, Any]]:
    """Train a CrossEncoder on pairs of texts, which it tokenizes in each step."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    import trainfit

    model = built((case, exact), lambda: cross_encoder(case, given, exact=exact))
    if arm.endswith("-compiled"):
        model.compile()
    cuda = torch.cuda.is_available()
    words = config_of(case, tiny=given.tiny, dropout=True).vocab_size - 5
    draw = torch.Generator().manual_seed(1)

    def text(size: int) -> str:
        return " ".join(f"w{one}" for one in torch.randint(words, (size,), generator=draw).tolist())

    sizes = lengths_of(case, given, clock.last, exact=exact)
    rows = [(text(10), text(max(1, size - 13)), at % 2) for at, size in enumerate(sizes)]
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the last training
    accelerator = Accelerator(mixed_precision="bf16" if cuda and not exact else "no")

    def collate(items: list[tuple[str, str, int]]) -> dict[str, Any]:
        queries, texts, labels = zip(*items, strict=True)
        return {"queries": queries, "texts": texts, "labels": torch.tensor(labels)}

    loader = torch.utils.data.DataLoader(rows, batch_size=given.batch, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=cuda)
    if ARMS[arm]:
        trainfit.speed_up(model, only=ARMS[arm], quiet=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    clock.model = model
    loss_of = BinaryCrossEntropyLoss(model)
    losses = []
    for batch in loader:
        with accelerator.autocast():
            loss = loss_of([batch["queries"], batch["texts"]], batch["labels"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item()] if exact else []
        clock.stepped()
    return model, losses, {}


def cross_encoder(case: str, given: argparse.Namespace, *, exact: bool) -> Any:
    """Build a CrossEncoder with a tokenizer of made-up words, from a folder as the hub's."""
    from sentence_transformers import CrossEncoder
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    config = config_of(case, tiny=given.tiny, dropout=not exact, num_labels=1)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = special + [f"w{at}" for at in range(config.vocab_size - len(special))]
    vocabulary = {word: at for at, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{word.strip('[]').lower()}_token": word for word in special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.model_max_length = LONGEST
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return CrossEncoder(folder, num_labels=1, max_length=LONGEST)


if __name__ == "__main__":
    main()
