"""Completion as the shells ask for it."""

import shutil
import subprocess
import sys

import pytest

from trainfit.cli.job_words import TASKS
from trainfit.cli.main import COMMANDS, run
from trainfit.conf import SCHEMAS, options


def completed(words: str, shell: str = "bash") -> list[str]:
    """What the shell is offered for the last of these words."""
    parts = words.split(" ")
    code = (
        "import sys\nfrom trainfit.cli.main import run\n"
        "try:\n    run([])\nfinally:\n"
        "    heavy = {'torch', 'hydra'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(parts) - 1),
            "_TRAINFIT_COMPLETE": f"{shell}_complete",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_tasks_presets_keys_and_values():
    assert completed("trainfit d") == ["doctor"]
    assert set(completed("trainfit ")) == set(COMMANDS)
    assert completed("trainfit train t") == ["textclass", "tokens"]
    assert completed("trainfit config nli hardware=gpu_") == [
        f"hardware={name}" for name in options("nli", "hardware") if name.startswith("gpu_")
    ]
    assert "training.eval_steps=" in completed("trainfit train gpt training.ev")
    assert completed("trainfit train nli device.mixed_precision=") == [
        f"device.mixed_precision={word}" for word in ("auto", "bf16", "fp16", "off")
    ]
    assert completed("trainfit train nli optimization.compile=") == [
        f"optimization.compile={word}" for word in ("true", "false", "auto")
    ]
    assert completed("trainfit train nli x.y=") == []


def test_bash_makes_three_words_of_key_and_value():
    assert completed("trainfit plan nli hardware = t") == ["t4"]
    assert completed("trainfit plan nli hardware = t4 cv.f") == ["cv.folds="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_can_read(shell: str, capsys: pytest.CaptureFixture[str]):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_TRAINFIT_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run(["completion", "tcsh"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_tasks_are_those_of_the_schemas():
    assert set(TASKS) == {task for task in SCHEMAS if ":" not in task}  # a test may add its own
