"""key=value words, configuration files and search spaces."""

from __future__ import annotations

import random
from functools import cache

from fuzz_case import FIFO, FOLDER, LOOP, ZERO, Case, Special, kind
from fuzz_templates import TINY
from fuzz_values import (
    ANY_VALUES,
    EDGES,
    GRAMMAR,
    KEYS,
    NON_FINITE,
    PREFIXES,
    TEXTS,
    WRONG_NUMBERS,
)

from trainfit.conf.composition import key_type, keys
from trainfit.core.codec import describe

TASKS = ("nli", "textclass", "pairs", "tokens", "gpt")


@cache
def numeric(task: str) -> frozenset[str]:
    """The keys of a task that hold numbers."""
    return frozenset(key for key in keys(task) if "number" in describe(key_type(task, key)))


def _word(chosen: random.Random, task: str) -> tuple[str, bool]:
    """A word, and whether it must be refused."""
    key = chosen.choice(keys(task))
    if key in numeric(task) and chosen.random() < 0.6:
        return f"{key}={chosen.choice(WRONG_NUMBERS)}", True
    return f"{key}={chosen.choice(ANY_VALUES)}", False


@kind(30)
def words(chosen: random.Random) -> Case:
    task = chosen.choice(TASKS)
    made = [_word(chosen, task) for _ in range(chosen.choice([1, 1, 1, 2, 4]))]
    # Of two words for one key the last one counts.
    last = {word.partition("=")[0]: wrong for word, wrong in made}
    more = chosen.choice([[], [], ["--json"]])
    expect = "refused" if any(last.values()) else "any"
    return Case(["config", task, *(word for word, _ in made), *more], expect=expect)


@kind(10)
def word_grammar(chosen: random.Random) -> Case:
    task = chosen.choice([*TASKS, *TASKS, *TASKS, "", "nlI", "../nli", "gpt\0", "x" * 5000])
    known = keys(task if task in TASKS else "nli")
    key = chosen.choice(PREFIXES) + chosen.choice([*KEYS, *known])
    joint = chosen.choice(["=", "=", "=", "", "==", ":", "=\n", " = "])
    word = f"{key}{joint}{chosen.choice(ANY_VALUES)}"
    if chosen.random() < 0.1:
        word = chosen.choice([*TEXTS, *GRAMMAR])
    elif chosen.random() < 0.15:
        word = f"{chosen.choice(['hardware', 'experiment'])}={chosen.choice(ANY_VALUES)}"
    command = chosen.choice(["config", "config", "plan", "train"])
    return Case([command, task, word, *(["--dry-run"] if command == "train" else [])])


def _replaced(task: str, word: str) -> list[str]:
    """The words of the tiny job, with `word` in place of its own."""
    key = word.partition("=")[0]
    return [*(one for one in TINY[task] if one.partition("=")[0] != key), word]


_COSTLY = ("tracking", "tune", "data.train", "data.data_dir", "data.scale", "training.num_workers")
"""Keys whose right values would make a case long, or send something away."""


@kind(12)
def dry_runs(chosen: random.Random) -> Case:
    task = chosen.choice(TASKS)
    word, wrong = _word(chosen, task)
    while word.startswith(_COSTLY):
        word, wrong = _word(chosen, task)
    argv = ["train", task, "--dry-run", "runs_dir=runs", *_replaced(task, word)]
    return Case(argv, template=task, expect="refused" if wrong else "any")


@kind(4)
def training(chosen: random.Random) -> Case:
    """One real step with a number at the edge of what its key takes."""
    task = chosen.choice(TASKS)
    named = ("training.", "model.lora", "model.dropout", "model.head", "data.max", "data.neg")
    among = [key for key in sorted(numeric(task)) if key.startswith(named)]
    short = {"training.num_epochs", "training.max_steps", "training.num_workers"}
    key = chosen.choice([key for key in among if key not in short])
    value = chosen.choice([*EDGES, "1e308", "1e-30", "65", "1000000"])
    return Case(["train", task, "runs_dir=runs", *_replaced(task, f"{key}={value}")], template=task)


@kind(3)
def plans(chosen: random.Random) -> Case:
    """The planner itself, on shapes that are tiny or absurd."""
    task = chosen.choice(["gpt", "gpt", "nli"])
    shapes = {
        "gpt": ["model.n_layer", "model.n_head", "model.n_embd", "model.vocab_size"],
        "nli": ["model.lora_rank", "model.pool_tokens"],
    }
    common = ["data.max_length", "training.batch_size", "training.effective_batch_size"]
    key = chosen.choice([*shapes[task], *common])
    value = chosen.choice(["1", "3", "7", "64", "100000", "10000000", "2000000000"])
    gpu = chosen.choice([[], ["--gpu", "t4"], ["--gpu", "t4", "--memory", "0.001"]])
    words = _replaced(task, f"{key}={value}")
    words = [word.replace("=model", "={here}/model") for word in words]
    return Case(["plan", task, *words, *gpu], template=task, real_plan=True)


def _bomb(levels: int = 12) -> str:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


_REFUSED_FILES: dict[str, str | bytes | Special] = {
    "recursion": "a: &a [*a]",
    "recursion of keys": "training: &t\n  batch_size: 4\n  more: *t",
    "recursion in a known key": "model:\n  name: &a [*a]",
    "alias bomb": _bomb(),
    "alias bomb in a known key": "seed: 1\n" + _bomb() + "\nmodel: {name: *a11}",
    "deep list": "seed: " + "[" * 5000 + "]" * 5000,
    "deep mapping": "{a: " * 3000 + "1" + "}" * 3000,
    "deep blocks": "\n".join(f"{' ' * n}k:" for n in range(900)),
    "binary": "model:\n  name: !!binary aGVsbG8=",
    "binary seed": "seed: !!binary aGVsbG8=",
    "python tag": "seed: !!python/object/apply:os.system ['id']",
    "python name": "seed: !!python/name:os.system",
    "own tag": "seed: !mine 3",
    "set": "seed: !!set {1, 2}",
    "ordered": "seed: !!omap [a: 1]",
    "time": "seed: 2020-01-01",
    "time of day": "seed: 2020-01-01T10:00:00Z",
    "same key twice": "seed: 1\nseed: 2",
    "same section twice": "training:\n  batch_size: 4\ntraining:\n  max_steps: 3",
    "same key by section and dots": "training:\n  batch_size: 4\ntraining.batch_size: 8",
    "same key by alias": "training:\n  batch_size: 4\nBATCH_TRAIN: 8",
    "merge of a list": "<<: [1, 2]",
    "null key": "null: 3",
    "number key": "3: 4",
    "float key": ".nan: 4",
    "true key": "true: 4",
    "list key": "? [a, b]\n: 3",
    "mapping key": "? {a: b}\n: 3",
    "tab": "seed:\t1\n\tx: 2",
    "two documents": "seed: 1\n---\nseed: 2",
    "a list": "- seed\n- 1",
    "a text": "seed",
    "a number": "3",
    "NUL": b"seed: 1\0",
    "NUL in a text": 'model:\n  name: "a\\0b"',
    "NUL in a path": 'runs_dir: "a\\0b"',
    "bad UTF-8": b"seed: \xff\xfe",
    "UTF-16 cut short": b"\xff\xfes",
    "surrogate": 'model:\n  name: "\\ud800"',
    "lone colon": ": :",
    "open quote": 'seed: "1',
    "open bracket": "seed: [1, 2",
    "unknown anchor": "seed: *nowhere",
    "nan": "training:\n  learning_rate: .nan",
    "inf": "training:\n  learning_rate: .inf",
    "quoted inf": "training:\n  learning_rate: 1e999",
    "huge": "training:\n  batch_size: 1" + "0" * 400,
    "huge exponent": "training:\n  batch_size: 1e+30",
    "huge digits": "seed: " + "9" * 5000,
    "huge hex": "seed: 0x" + "f" * 5000,
    "sexagesimal": "seed: 1" + ":59" * 50,
    "interpolation": "seed: ${seed}",
    "interpolation of a loop": "seed: ${training.batch_size}\ntraining: {batch_size: ${seed}}",
    "interpolation of the environment": "seed: ${oc.env:HOME}",
    "missing value": "seed: ???",
    "section as a value": "training: 3",
    "value as a section": "seed: {a: 1}",
    "endless": ZERO,
    "fifo": FIFO,
    "folder": FOLDER,
    "loop": LOOP,
    "large": b"seed: 1\n#" + b"x" * (1 << 23),
    "large value": "model:\n  name: " + "n" * (1 << 20),
    "many keys": "\n".join(f"k{n}: {n}" for n in range(20000)),
}


@kind(12)
def config_files(chosen: random.Random) -> Case:
    task = chosen.choice(TASKS)
    command = chosen.choice(["config", "config", "config", "train"])
    argv = [command, task, "--config", "c.yaml"]
    if command == "train":
        argv.append("--dry-run")
    if chosen.random() < 0.6:
        name = chosen.choice(sorted(_REFUSED_FILES))
        return Case(argv, files={"c.yaml": _REFUSED_FILES[name]}, expect="refused")
    key = chosen.choice(keys(task))
    value = chosen.choice(ANY_VALUES)
    text = f"{key}: {value}\n"
    if "." in key and chosen.random() < 0.7:
        section, name = key.split(".")
        text = f"{section}:\n  {name}: {value}\n"
    wrong = key in numeric(task) and value in NON_FINITE
    argv[0] = "config"
    return Case(argv[:4], files={"c.yaml": text}, expect="refused" if wrong else "any")


_BAD_SPACES = [
    "training.learning_rate=interval(1,0)",
    "training.learning_rate=interval(0,0)",
    "training.learning_rate=interval(nan,1)",
    "training.learning_rate=interval(0,inf)",
    "training.learning_rate=interval(-1,1)",
    "training.learning_rate=interval(1e-5,1e30)",
    "training.learning_rate=tag(log,interval(0,1))",
    "training.learning_rate=tag(log,interval(-1,1))",
    "training.learning_rate=a,b",
    "training.learning_rate=nan,1e-4",
    "training.learning_rate=-1,1e-4",
    "training.effective_batch_size=interval(1.5,8.5)",
    "training.effective_batch_size=a,b",
    "training.effective_batch_size=8,8.5",
    "training.effective_batch_size=0,8",
    "training.effective_batch_size=range(0,8)",
    "training.effective_batch_size=range(8,4)",
    "training.effective_batch_size=range(1,10,0)",
    "training.effective_batch_size=range(1.5,4)",
    "training.effective_batch_size=null,auto",
    "model.pooling=mean,nowhere",
    "model.pooling=interval(0,1)",
    "model.pooling=range(1,3)",
    "model.lora_rank=range(1,1)",
    "model.lora_rank=range(-4,4)",
    "model.lora_rank=range(4,100000000)",
    "model.lora_rank=[1],[2]",
    "model.head_dropout=interval(0,2)",
    "model.head_dropout=true,false",
    "model.nowhere=1,2",
    "nowhere=interval(0,1)",
    "hpo.space={training.learning_rate:{kind:log,low:0,high:1}}",
    "hpo.space={training.learning_rate:{kind:log,low:1,high:1e-4}}",
    "hpo.space={training.learning_rate:{kind:log}}",
    "hpo.space={training.learning_rate:{kind:odd}}",
    "hpo.space={training.learning_rate:{kind:uniform,low:nan,high:1}}",
    "hpo.space={training.learning_rate:{kind:categorical}}",
    "hpo.space={training.learning_rate:{kind:categorical,choices:[a]}}",
    "hpo.space={training.learning_rate:{kind:categorical,choices:[{a:1}]}}",
    "hpo.space={training.learning_rate:{kind:int,low:0.1,high:0.9}}",
    "hpo.space={nowhere:{kind:int,low:1,high:3}}",
    "hpo.space={}",
    "hpo.space=[]",
    "hpo.space=3",
    "hpo.config={nowhere:1}",
    "hpo.config={training.learning_rate:nan}",
    "hpo.metric=nowhere",
    "hpo.metric=3",
    "hpo.trials=0",
    "hpo.pruner=odd",
    "hpo.storage=nowhere",
    "hpo.storage=sqlite:////nowhere/at/all.db",
    "hpo.storage=oracle://x",
    "hpo.study=[1]",
    "hpo=nowhere",
]
_HPO_NUMBERS = [
    "trials",
    "hours",
    "sampler_startup",
    "pruner_startup",
    "pruner_warmup",
    "pruner_threshold",
    "least_steps",
    "heartbeat",
    "grace",
    "retries",
]


@kind(8)
def search_spaces(chosen: random.Random) -> Case:
    task = "nli"
    if chosen.random() < 0.2:
        word = f"hpo.{chosen.choice(_HPO_NUMBERS)}={chosen.choice(WRONG_NUMBERS)}"
    else:
        word = chosen.choice(_BAD_SPACES)
    job = ["cv.folds=2", "hpo.hours=0", "runs_dir=runs"]
    job = [one for one in job if one.partition("=")[0] != word.partition("=")[0]]
    return Case(["hpo", task, *TINY[task], *job, word], template=task, expect="refused")
