"""Entry point: find the command, run it, and turn every error into one line."""

from __future__ import annotations

import atexit
import errno
import gc
import hashlib
import importlib
import io
import math
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

import click

from trainfit import __version__
from trainfit.core.errors import (
    BadInput,
    TrainfitError,
    TrainfitWarning,
    brief,
    did_you_mean,
    in_one_line,
    reason,
    redact,
    user_line,
)
from trainfit.core.libraries import PIP_NAMES, missing

_JOB = re.compile(r"[\w.]+:\w+")
"""A job of the user's own: module:Class."""
COMMANDS = {
    "check": "Hardware, what it supports, and the settings to start from.",
    "plan": "Every setting of a run with its reason, for this machine or any GPU.",
    "tune": "Measure what is fastest on this machine, and keep it for train.",
    "train": "Train a job, score it on held-out data, and export the model.",
    "hpo": "Search a job's settings over folds, with one worker or many.",
    "launch": "A job file for Slurm, SkyPilot, Kubeflow or Docker.",
    "verify": "Show which settings were really active, by evidence of a step.",
    "run": "Run a training script of your own faster, with the same losses.",
    "predict": "Probabilities from a trained model, for a text or a file.",
    "export": "The model of a finished run as ONNX, or on the hub.",
    "report": "Runs as one HTML page: scores, curves, plan, events.",
    "watch": "A running job in the terminal, from another terminal.",
    "prepare": "Token files of a corpus, for pretraining a GPT.",
    "sample": "Text from a trained GPT.",
    "config": "The composed configuration, and where each value came from.",
    "init": "Write a commented configuration to start from.",
    "doctor": "Find faults here, in a log or in a run, and how to fix them.",
    "completion": "The script that lets a shell complete trainfit's words.",
}
_PLACES = {
    "tune": "plan",
    "run": "verify",
    "doctor": "check",
    **dict.fromkeys(("prepare", "report", "watch"), "train"),
    **dict.fromkeys(("predict", "export", "sample"), "inference"),
    **dict.fromkeys(("config", "init", "completion"), "job_words"),
}
"""Modules of commands that share one; each is a function of its own name there."""
INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_LINE = 1000
"""Longest line of an error, since a name in it may have a million characters."""


class _Commands(click.Group):
    """Loads a command's module only when it is called, so that `--help` is quick."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"trainfit.cli.{_PLACES.get(name, name)}")
        command: click.Command = getattr(module, name if name in _PLACES else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = did_you_mean(args[0], COMMANDS, f"the commands are {', '.join(COMMANDS)}")
            raise click.UsageError(f"unknown command {args[0]!r}; {near}")
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trainfit")
def trainfit() -> None:
    """Fits a training run to the hardware it is on."""


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file would take its number, and its text
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × gets a ? and not an error
    sys.excepthook = _show_traceback
    _leave(run(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """Exit once threads, handlers and output are done: taking CUDA's context down takes seconds."""
    compilers = sys.modules.get("torch._inductor.async_compile")
    for pool in getattr(compilers, "_pool_set", ()):
        # A compiling process ends by itself once this one is gone; torch waits a second for it.
        pool.running = False
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and ends their pools
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed pipe, or none
            stream.flush()
    os._exit(code)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in three quarters of the time, without looking for garbage among the new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # nor among these later: what follows imports more
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """Import torch and all that a job needs, and say so: it takes seconds."""
    from trainfit.reports import terminal
    from trainfit.runs import run_folder

    with quick_imports():
        if run_folder.is_first_rank():
            with terminal.busy("loading the libraries"):
                yield
        else:
            yield


def run(arguments: list[str]) -> int:
    """Run one command: 0, 1 for a finding or a failure, 2 for bad input."""
    if any("\0" in word for word in arguments):  # no shell can send it, but a program may
        return _fail("a word of the command holds a NUL character; leave it out", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrainfitWarning)
        warnings.showwarning = _show_warning
        try:
            code = trainfit.main(
                arguments, prog_name="trainfit", standalone_mode=False, obj=tuple(arguments)
            )
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            print(error.format_message())
            return 0
        except click.ClickException as error:
            return _fail(_with_help(error), 2)
        except TrainfitError as error:
            return _fail(str(error), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1  # as click and rich do: a training may not have ended
        except Exception as error:  # the last resort: no traceback reaches a user
            if lacking := _lacking(error, arguments[0]):
                return _fail(str(lacking), lacking.exit_code)
            if os.environ.get("TRAINFIT_TRACEBACK"):
                raise
            return _fail(_unexpected(error, arguments), 1)
    return code if isinstance(code, int) else 0


def tell_notes(*notes: str) -> None:
    """Print notes to standard error."""
    for note in notes:
        click.echo(f"trainfit: note: {note}", err=True)


def machines_and_gpus(gpus: str, least: int = 1) -> tuple[int, int]:
    """Read a number of GPUs, or of machines and the GPUs of each, such as 2x8."""
    found = re.fullmatch(r"(?:([1-9]\d{0,4})x)?(0|[1-9]\d{0,4})", gpus)
    if found is None or int(found[2]) < least:
        cpu = "" if least else "; 0: a CPU"
        raise BadInput(f"--gpus {gpus}", f"give a number, or machines x GPUs such as 2x8{cpu}")
    return int(found[1] or 1), int(found[2])


def _unexpected(error: Exception, arguments: list[str]) -> str:
    """Word an error that nothing foresaw; one of a job of the user's is told by its line."""
    if any(map(_JOB.fullmatch, arguments)) and (at := user_line(error)):
        hint = f"look at {at}, or set TRAINFIT_TRACEBACK=1 to see all"
        return f"the job fails with {in_one_line(error)}; {hint}"
    if isinstance(error, OSError) and error.errno in _FULL:
        place = error.filename or "the output"
        return f"cannot write {place} ({reason(error)}); free some space, or write elsewhere"
    if isinstance(error, MemoryError):
        return "the memory of this machine ran out; end other programs, or give less data"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    hint = "set TRAINFIT_TRACEBACK=1 to see where, and report it"
    return f"internal error, {type(error).__name__}: {first}; {hint}"


def _with_help(error: click.ClickException) -> str:
    """Add the command's --help to a usage error that names no fix."""
    message = " ".join(error.format_message().split())  # choices come a line each
    context = getattr(error, "ctx", None)
    if context is None or ";" in message or "Did you mean" in message:
        return message
    return f"{message.rstrip('.')}; `{context.command_path} --help` shows what it takes"


def _lacking(error: Exception, command: str) -> BadInput | None:
    """Word the error of a library that is not installed; None for any other error."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in PIP_NAMES:
        return None
    return missing(command, name)


def _fail(message: str, code: int) -> int:
    lines = [f"trainfit: {_readable(line)}" for line in redact(message).splitlines()]
    if not _is_said("\n".join(lines)):
        print("\n".join(lines), file=sys.stderr, flush=True)
    return code


def _is_said(text: str) -> bool:
    """True where a rank of this machine said the same, also before a restart.

    The folder is torchrun's, which clears it.
    """
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if own is None:
        return False
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        (Path(own).parents[2] / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # said twice is better than not at all
        pass
    return False


def _readable(line: str) -> str:
    """Escape unprintable characters of a line, and shorten it."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return brief(plain, _LONGEST_LINE)


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print trainfit's warnings as one line, and those of libraries as Python does."""
    if issubclass(category, TrainfitWarning):
        text: Any = f"trainfit: note: {_readable(redact(str(message)))}\n"
    else:
        text = redact(warnings.formatwarning(message, category, filename, lineno, line))
    (file or sys.stderr).write(text)


class Number(click.FloatRange):
    """A finite number within bounds; click's own range takes nan."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert to a number, or fail with the option and its bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


SEED = click.IntRange(0, 2**32 - 1)
MANY = click.IntRange(1, 10**6)
ABOVE_0 = Number(0, 10**6, min_open=True)
