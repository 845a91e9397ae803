"""`trainfit launch`: a complete job file for a cluster, from a command and its plan."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trainfit.cli.job_words import SHORT, all_words
from trainfit.cli.main import machines_and_gpus
from trainfit.core.errors import BadInput, RunFailed
from trainfit.core.files import write_whole

_ENDS = {"slurm": "sbatch", "sky": "yaml", "kubeflow": "yaml", "docker": "sh"}
_WARNING = 300
"""Seconds before the end of an allocation in which a checkpoint is saved."""
_CPUS = 8
"""Cores for each GPU where no plan says how many its loader takes."""
_MARGIN = 1.5
"""Time of the allocation by the predicted time of the job."""


def job_file(
    kind: str, words: Sequence[str], *, each: int, program: str = "trainfit", **facts: Any
) -> str:
    """Fill the template of a kind of job.

    `words` are the command after `trainfit`, `each` the GPUs of a machine (0 for a CPU). `program`
    is the program as the job finds it: a path's folder is put before PATH.
    """
    from jinja2 import Environment, StrictUndefined

    template = Path(__file__).with_name("job_files").joinpath(f"{kind}.j2")
    made = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    command, task = words[0], _plain(words[1])
    run = _continued(kind, words, each)
    return made.from_string(template.read_text(encoding="utf-8")).render(
        name=f"trainfit-{task}" if command == "train" else f"trainfit-hpo-{task}",
        command=shlex.join(["trainfit", *words]),
        run=shlex.join(run),
        torchrun=json.dumps(["torchrun", "-m", *run]),
        python=shlex.quote(str(Path(program).parent)) if "/" in program else "",
        package="trainfit[hpo]" if command == "hpo" else "trainfit",
        warning=_WARNING,
        each=each,
        **facts,
    )


def _continued(kind: str, words: Sequence[str], each: int) -> list[str]:
    """Return the command of a job that continues an earlier one."""
    away = kind != "slurm"  # a job in a container has its runs on a volume
    place = away and not any(word.startswith(("runs_dir=", "--output")) for word in words)
    run = ["trainfit", *words, *(["runs_dir=/runs"] if place else [])]
    if words[0] == "hpo":
        return run
    gpus = [] if kind == "kubeflow" else ["--gpus", "all" if each else "1"]
    return [*run, "--resume", "auto", *gpus]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("kind", type=click.Choice(tuple(_ENDS)))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="train|hpo TASK [WORDS]…")
@click.option("--gpus", default="1", show_default=True, help="GPUs, or machines x GPUs: 2x8.")
@click.option("--gpu", metavar="SLUG", help="Model of the GPUs; the plan gives time and cores.")
@click.option("--cpus", type=click.IntRange(1, 1024), help="Cores of each machine.")
@click.option("--time", "limit", metavar="HH:MM:SS", help="Limit of the allocation.")
@click.option("--array", type=click.IntRange(1, 10_000), help="Workers of a study, a job each.")
@click.option("--partition", help="Slurm's partition.")
@click.option("--image", default="trainfit", show_default=True, help="Image of a container.")
@click.option("--volume", default="trainfit-runs", show_default=True, help="Where runs are kept.")
@click.option("--file", "file", help="The file to write; trainfit-TASK by default.")
@click.option("--submit", is_flag=True, help="Submit it, to Slurm.")
def command(
    kind: str,
    words: tuple[str, ...],
    gpus: str,
    gpu: str | None,
    cpus: int | None,
    limit: str | None,
    array: int | None,
    partition: str | None,
    image: str,
    volume: str,
    file: str | None,
    submit: bool,
) -> None:
    """A job file for Slurm, SkyPilot, Kubeflow or Docker.

    KIND is slurm, sky, kubeflow or docker. After it comes the command, such as train nli
    data.data_dir=redsm5; options of launch come before it. The job saves a checkpoint before its
    allocation ends and continues from it when it is started again.
    """
    nodes, each = machines_and_gpus(gpus, least=0)
    task, composed = _checked(words)
    words = _fitting(kind, words, nodes, each, gpu, array)
    if submit and (kind != "slurm" or shutil.which("sbatch") is None):
        fix = "leave it out, and take the file there"
        raise BadInput("--submit needs Slurm's sbatch here", fix)
    planned, seconds = _planned(composed, gpu, nodes, each)
    path = Path(file or f"trainfit-{_plain(task)}.{_ENDS[kind]}")
    text = job_file(
        kind,
        words,
        nodes=nodes,
        each=each,
        cpus=cpus or planned,
        time=limit or _clock(seconds),
        file=str(path),
        array=array,
        partition=partition,
        image=image,
        bucket=volume,
        accelerator=_accelerator(gpu),
        program=str(Path(sys.executable).with_name("trainfit")) if kind == "slurm" else "trainfit",
    )
    write_whole(path, text)
    click.echo(f"Wrote {path}")
    if submit:
        _submit(path)


def _checked(words: tuple[str, ...]) -> tuple[str, Any]:
    """Return task and configuration of the command, or raise BadInput for what is wrong in it."""
    from trainfit.cli import train
    from trainfit.conf.search_space_files import compose_study
    from trainfit.jobs.configuration import configure
    from trainfit.jobs.registry import check_job

    if len(words) < 2 or words[0] not in ("train", "hpo"):
        raise BadInput("no command to launch", "write train or hpo, the task and its words")
    task = words[1]
    check_job(task)
    if words[0] == "hpo":
        return task, configure(task, compose_study(task, words[2:]).job)
    given = train.command.make_context("train", list(words[1:])).params
    short = {name: given[name] for name in SHORT}
    return task, configure(task, all_words(task, given["overrides"], short))


def _fitting(
    kind: str, words: tuple[str, ...], nodes: int, each: int, gpu: str | None, array: int | None
) -> tuple[str, ...]:
    """Return the command as this kind of job can run it, or raise BadInput."""
    study = words[0] == "hpo"
    if array is not None and (not study or kind not in ("slurm", "sky")):
        raise BadInput("--array is for workers of a study on Slurm or SkyPilot", "leave it out")
    if study and (kind == "kubeflow" or nodes > 1):
        raise BadInput(f"a study is no job of {nodes}x{each} ranks on {kind}", "use --array N")
    if kind == "docker" and nodes > 1:
        raise BadInput("docker starts containers on one machine", "use slurm, sky or kubeflow")
    if kind == "sky" and each and gpu is None:
        raise BadInput("SkyPilot has to know which GPU", "add --gpu h100, or another one")
    if array is None or any(word.startswith("hpo.storage=") for word in words):
        return words
    if kind == "sky":  # a bucket has no locks
        raise BadInput("workers need a database", "add hpo.storage=postgresql://USER@HOST/NAME")
    return (*words, f"hpo.storage=journal:trainfit-{_plain(words[1])}.journal")


def _plain(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-").lower()


def _planned(composed: Any, gpu: str | None, nodes: int, each: int) -> tuple[int, float | None]:
    """Return the cores of a machine, and the time of the job where the plan has it."""
    if gpu is None:
        return _CPUS * max(1, each), None
    from trainfit.jobs import job_plan
    from trainfit.reports import terminal

    with terminal.busy("planning"):
        profile = job_plan.machine(composed, gpu)
        how: Any = {"ranks": nodes * max(1, each), "machines": nodes}
        plan = job_plan.answer(composed, job_plan.asked_question(composed), profile, **how)
    if not plan.fits:
        raise BadInput(plan.verdict(), plan.advice[0] if plan.advice else "take more GPUs")
    return max(1, each) * (1 + plan.num_workers), plan.time.total_seconds if plan.time else None


def _clock(seconds: float | None) -> str:
    """Time of an allocation: half as much again as predicted, or a day."""
    minutes = 24 * 60 if seconds is None else max(30, math.ceil(seconds * _MARGIN / 60))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _accelerator(gpu: str | None) -> str:
    """SkyPilot's name of a GPU: the word before the form and the memory, in capitals."""
    if gpu is None:
        return ""
    from trainfit.hardware.catalogue import find

    slug = find(gpu).slug.upper()
    name = re.sub(r"-(SXM\d?|PCIE|\d+GB).*", "", slug)
    wide = "-80GB" if name == "A100" and "80GB" in slug else ""
    return name.replace("RTX-", "RTX") + wide


def _submit(path: Path) -> None:
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunFailed(f"sbatch refused {path} ({said})", "change it, and submit it with sbatch")
    click.echo(done.stdout.strip())
