"""The command line as a person or a program meets it."""

import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainfit import __version__
from trainfit.cli import main as entry
from trainfit.cli.main import COMMANDS, quick_imports, run
from trainfit.jobs import tuned_plans
from trainfit.reports.terminal import busy

pytestmark = pytest.mark.usefixtures("tiny_default")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def as_here(words: list[str]) -> str:
    """The start of a program that runs the command with that model."""
    return (
        "import sys\nfrom trainfit.jobs import tuned_plans\n"
        f"tuned_plans.OVERRIDES = {tuned_plans.OVERRIDES!r}\n"
        f"from trainfit.cli.main import run\ncode = run({words!r})\n"
    )


@pytest.mark.parametrize(
    "words", [["--help"], ["check", "--gpu", "t4", "--json"], ["config", "nli"]]
)
def test_torch_is_not_imported(words: list[str]):
    assert run(words) == 0  # with its plan kept, the child need not make one
    done = python(
        as_here(words) + "heavy = {'torch', 'transformers', 'optuna'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    assert done.returncode == 0, done.stderr


WRONG = {
    "train nli data.data_dir=gone": "no redsm5_posts.csv in gone",
    "train nli data.data_dir=posts": "redsm5_posts.csv has no column text",
    "train textclass data.train=gone.csv": "no file gone.csv",
    "train textclass data.train=rows.csv": "rows.csv: no column is recognised as label",
    "train textclass data.train=rows.jsonl": "rows.jsonl: no column is recognised as text",
    "train nli model.name=empty": "no config.json in empty",
    "train nli model.name=bert-bse": "did you mean bert-base",
    "train gpt data.data_dir=gone": "no file or folder gone",
    "plan nli --model empty": "no config.json in empty",
    "plan gpt --model bert-base --gpu t4": "bert-base is no model for gpt",
    "plan nli --gpu t5": "did you mean t4",
    "tune textclass data.train=gone.csv": "no file gone.csv",
    "tune nli model.name=empty": "no config.json in empty",
    "hpo nli data.data_dir=gone": "no redsm5_posts.csv in gone",
    "hpo textclass data.train=rows.csv": "rows.csv: no column is recognised as label",
    "predict gone --text a": "no run 'gone'",
    "predict unfinished --text a": "no exported model",
    "sample gone": "no run 'gone'",
}


def test_mistakes_are_told_before_torch_is_imported(tmp_path: Path):
    """One line each, in far less than a second of the processor's time."""
    for folder in ("posts", "empty", "unfinished"):
        (tmp_path / folder).mkdir()
    (tmp_path / "posts/redsm5_posts.csv").write_text("post_id,words\n1,a\n")
    (tmp_path / "posts/redsm5_annotations.csv").write_text("post_id,DSM5_symptom,status\n")
    (tmp_path / "rows.csv").write_text("text,kind,when\na,1,2\n")
    (tmp_path / "rows.jsonl").write_text('{"words": "a", "when": 2, "label": 1}\n')
    (tmp_path / "unfinished/run.json").write_text("{}")
    code = (
        "import sys\nfrom trainfit.cli.main import run\n"
        f"for words in {list(WRONG)!r}:\n"
        "    assert run(words.split()) == 2, words\n"
        "    heavy = {'torch', 'transformers', 'optuna', 'sklearn'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG), done.stderr
    for said, line in zip(WRONG.values(), lines, strict=True):
        assert said in line
    assert after.ru_utime - before.ru_utime < len(WRONG) * 0.5


def test_a_stage_says_what_it_does_and_its_time(capsys: pytest.CaptureFixture[str]):
    with busy("counting"):
        assert capsys.readouterr().err == "trainfit: counting\n"
        time.sleep(1.05)
    assert re.fullmatch(r"trainfit: counting: 1\.\d s\n", capsys.readouterr().err)
    with busy("done at once"):
        pass
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "trainfit: done at once\n")


def test_import_trainfit_imports_no_torch():
    done = python("import sys, trainfit\nsys.exit('torch' in sys.modules)")
    assert done.returncode == 0


def test_help_is_quick():
    """By its own time of the processor, which others do not take; and it waits for nothing."""
    own, times = [], []
    for _ in range(3):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "trainfit", "--help"], capture_output=True, check=True
        )
        times.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        own.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert b"check" in done.stdout
    assert min(own) < 0.4
    assert min(times) < 3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert COMMANDS[name] in shown
    assert "\\b" not in shown, "click's mark for lines that are not wrapped"


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]):
    assert run([]) == 0
    assert "Commands" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_check_for_a_program(capsys: pytest.CaptureFixture[str]):
    assert run(["check", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"gpus", "cpu", "memory_gib", "torch", "recommended"} <= set(data)
    assert data["cpu"]["cores"] >= 1
    assert {
        "precision",
        "batch_size",
        "num_workers",
        "gradient_checkpointing",
        "gradient_accumulation_steps",
        "compile",
    } <= set(data["recommended"])


@pytest.mark.parametrize(
    ("gpu", "slug", "precision", "tf32"),
    [
        ("t4", "t4", "fp16", False),
        ("a100-sxm4-80gb", "a100-sxm4-80gb", "bf16", True),
        ("a100", "a100-sxm4-80gb", "bf16", True),
        ("h200", "h200-sxm-141gb", "bf16", True),
    ],
)
def test_a_gpu_that_is_not_here(
    gpu: str, slug: str, precision: str, tf32: bool, capsys: pytest.CaptureFixture[str]
):
    assert run(["check", "--gpu", gpu, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"]
    [shown] = data["gpus"]
    assert (shown["slug"], shown["tf32"], shown["native_bf16"]) == (slug, tf32, tf32)
    assert {"name", "memory_gib", "compute_capability"} <= set(shown)
    assert (data["recommended"]["precision"], data["recommended"]["tf32"]) == (precision, tf32)
    said = [note["text"] for note in data["notes"] if note["code"] == "short_form"]
    assert bool(said) == (gpu != slug)
    assert all(slug in text for text in said)


def test_check_for_a_person(capsys: pytest.CaptureFixture[str]):
    assert run(["check", "--gpu", "3090"]) == 0
    page = capsys.readouterr().out
    for word in (
        "NVIDIA GeForce RTX 3090",
        "not in this machine",
        "23.56 GiB",
        "8.6",
        "BFloat16",
        "TF32",
        "Recommended settings",
        "batch_size",
        "why",
        "good 18 to 22%",
        "taken as rtx-3090",
    ):
        assert word in page


@pytest.mark.parametrize(
    ("gpu", "capability", "fp16", "bf16", "tf32"),
    [
        ("t4", "7.5", "yes", "no", "no"),
        ("v100", "7.0", "yes", "no", "no"),
        ("a100", "8.0", "yes", "yes", "yes"),
        ("a10", "8.6", "yes", "yes", "yes"),
    ],
)
def test_check_shows_the_t4_guides_table(
    gpu: str, capability: str, fp16: str, bf16: str, tf32: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["check", "--gpu", gpu]) == 0
    page = capsys.readouterr().out
    wanted = {"Compute capability": capability, "FP16": fp16, "BFloat16": bf16, "TF32": tf32}
    for row, value in wanted.items():
        assert re.search(rf"│ {row} +{re.escape(value)}\b", page), row


def test_check_short(capsys: pytest.CaptureFixture[str]):
    assert run(["check", "--short", "--gpu", "t4"]) == 0
    line = "0: Tesla T4, 14.74 GiB, compute capability 7.5, bf16 no, TF32 no\n"
    assert capsys.readouterr().out == line
    assert run(["check", "--short"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_catalogue_can_be_listed(capsys: pytest.CaptureFixture[str]):
    assert run(["check", "--gpu", "list"]) == 0
    page = capsys.readouterr().out
    assert "h200-sxm-141gb" in page
    assert page.count("\n") > 120


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--gpu", "t5"], "unknown GPU 't5'; did you mean t4"),
        (["check", "--gpu", "t4", "--measure"], "--measure cannot measure t4"),
        (["check", "--jsn"], "--json"),
        (["chek"], "unknown command 'chek'; did you mean check?"),
        (["config"], "TASK"),
        (["config", "nlu"], "unknown task 'nlu'; did you mean nli?"),
        (["config", "nli", "training.batch_sise=3"], "did you mean training.batch_size"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("trainfit: ")


def test_several_mistakes_are_a_line_each(capsys: pytest.CaptureFixture[str]):
    assert run(["config", "nli", "hardware=gpu_409", "seed=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_an_internal_error_shows_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_args: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr("trainfit.conf.compose", broken)
    assert run(["config", "nli"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("trainfit: internal error, ZeroDivisionError: first;")
    assert "Traceback" not in err
    assert err.count("\n") == 1
    monkeypatch.setenv("TRAINFIT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run(["config", "nli"])


def test_memory_that_runs_out_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def too_large(*_args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trainfit.conf.compose", too_large)
    assert run(["config", "nli"]) == 1
    assert capsys.readouterr().err.startswith("trainfit: the memory of this machine ran out; ")


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def stopped(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainfit.conf.compose", stopped)
    assert run(["config", "nli"]) == entry.INTERRUPTED
    assert capsys.readouterr().err.strip() == "trainfit: interrupted"


def test_a_reader_that_stops_early_is_no_error_and_no_success():
    script = f"set -o pipefail; {sys.executable} -m trainfit check --gpu list | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # a training may not have ended
    assert done.stderr == ""


def test_config_names_the_origin_of_each_value(capsys: pytest.CaptureFixture[str]):
    words = ["config", "nli", "hardware=gpu_4090", "batch_size=20", "--json"]
    assert run(words) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["values"]["training.batch_size"] == {"value": 20, "from": "override"}
    assert data["values"]["training.num_workers"] == {"value": 8, "from": "preset gpu_4090"}
    assert "batch_size is training.batch_size" in captured.err
    assert run(words[:-1]) == 0
    page = capsys.readouterr().out
    [line] = [line for line in page.splitlines() if line.startswith("training.batch_size ")]
    assert line.split() == ["training.batch_size", "20", "override"]


@pytest.mark.soak
def test_measuring_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainfit.measuring.machine_rates.ITEM_SECONDS", 0.1)
    assert run(["check", "--measure", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rates = {item["name"]: item["value"] for item in data["measured"]["items"]}
    assert rates["matmul_fp32"] > 0
    assert rates["copy"] > 0
    assert len(list((tmp_path / "cache" / "measured").iterdir())) == 1
    assert run(["check", "--json"]) == 0  # kept, and shown with its date
    assert json.loads(capsys.readouterr().out)["measured"] == data["measured"]
    assert run(["check"]) == 0
    assert f"Measured {data['measured']['taken']}" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("trainfit.measuring.machine_rates.ITEM_SECONDS", 0.05)
    assert run(["check", "--measure", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["measured"]["items"]
    assert captured.err.startswith("trainfit: note: nothing is kept in the cache")


def test_a_terminal_without_unicode_is_served():
    assert run(["check", "--gpu", "t4"]) == 0  # the plan is kept
    words = [sys.executable, "-c", as_here(["check", "--gpu", "t4"]) + "sys.exit(code)"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Tesla T4" in done.stdout


def test_imports_look_for_no_garbage_and_later_code_does():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "train.log"], "Got unexpected extra argument (train.log); `trainfit doctor"),
        (["plan"], "Missing argument 'TASK'. Give one of nli, textclass, pairs, tokens, gpt, or"),
        (["prepare", "--output", "a"], "Missing argument 'TASK'; `trainfit prepare"),
        (["launch"], "Choose from: slurm, sky, kubeflow, docker; `trainfit launch"),
    ],
)
def test_a_wrong_word_names_the_help_in_one_line(words, said, capsys):
    assert run(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("--help` shows what it takes")
    assert said in line


def test_a_full_disk_under_the_output_is_one_line() -> None:
    script = f"{sys.executable} -m trainfit check --gpu list > /dev/full"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("trainfit: cannot write the output (No space left on device); ")


def test_closed_streams_are_no_error_and_no_file_takes_their_numbers(tmp_path: Path) -> None:
    """As some schedulers start jobs; a library that prints would write into such a file."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from trainfit.cli import main\n"
        "def opened(*_):\n"
        "    Path('number').write_text(str(os.open('some', os.O_CREAT | os.O_RDWR)))\n"
        "    print('printed'), print('printed', file=sys.stderr)\n"
        "    return 0\n"
        "main.run = opened\n"
        "main.main()\n"
    )
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(script)]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 0
    assert int((tmp_path / "number").read_text()) > 2
    assert (tmp_path / "some").read_text() == ""


@pytest.mark.soak
def test_compiling_processes_end_with_the_command_which_does_not_wait_for_them():
    """torch's own way at the exit asks them to end, and waits until they have."""
    done = python(
        "import psutil, torch\n"
        "from torch._inductor import async_compile, config\n"
        "from torch._inductor.compile_worker import subproc_pool\n"
        "from trainfit.cli.main import _leave\n"
        "config.compile_threads = 2\n"
        "pool = async_compile.AsyncCompile.process_pool()\n"
        "assert isinstance(pool, subproc_pool.SubprocPool)\n"
        "pool.submit(abs, -1).result()\n"
        "pool.process.wait = lambda *_: print('waited')\n"
        "print(*[one.pid for one in psutil.Process().children(recursive=True)])\n"
        "_leave(3)\n"
    )
    assert done.returncode == 3, done.stderr
    assert "waited" not in done.stdout
    processes = [int(word) for word in done.stdout.split()]
    assert processes
    ends = time.monotonic() + 30
    while any(map(_runs, processes)) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not any(map(_runs, processes))


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
