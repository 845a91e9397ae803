"""What mkdocs needs beside the pages: the ones made from other files, their order, and links.

The first page is README.md, the pages of GPUs come from the catalogue and the presets, and the
notebook is shown as a page. A page that nobody put in order still gets into the menu.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from trainfit.cli.main import COMMANDS
from trainfit.conf import layer, options
from trainfit.hardware.catalogue import GpuSpec, gpus

ROOT = Path(__file__).parent.parent
_TASKS = ("nli", "textclass", "gpt")
_GUIDES = (
    *("tuning", "batch-size", "ladder", "speed", "gpt", "many-gpus", "estimate"),
    *("troubleshooting", "safety", "integrations", "hardware-optimizer", "write-a-task"),
)
_INSIDE = ("architecture", "sources")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that there are in order."""
    there = {path.stem: path.name for path in Path(config.docs_dir).glob("*.md")}

    def take(names: tuple[str, ...]) -> list[str]:
        return [there.pop(name) for name in names if name in there]

    there.pop("index", None)
    groups: dict[str, list[Any]] = {
        "Start": [{"trainfit": "index.md"}, "colab-t4.md"],
        "Commands": take(tuple(COMMANDS)),
        "Guides": take(_GUIDES),
        "GPUs": ["gpus/index.md", *(f"gpus/{name}.md" for name in _presets())],
        "Inside": take(_INSIDE),
    }
    groups["More"] = sorted(there.values())
    config.nav = [{title: pages} for title, pages in groups.items() if pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {
        "index.md": (ROOT / "README.md").read_text(),
        "colab-t4.md": notebook_page(ROOT / "docs" / "colab-t4.ipynb"),
        "gpus/index.md": gpu_list(),
        **{f"gpus/{name}.md": preset_page(name) for name in _presets()},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_more: Any) -> str:
    """Links to what is in the repository and not on the site become the names of files."""
    known = {file.src_uri for file in files}
    base = PurePosixPath("" if page.file.src_uri == "index.md" else "docs")
    here = PurePosixPath(page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        place, _, anchor = target.partition("#")
        path = _normal(base / here / place)
        if path.startswith("docs/") and path[5:] in known:
            up = "../" * len(here.parts)
            return f"{picture}[{text}]({up}{path[5:]}{'#' + anchor if anchor else ''})"
        named = f"`{path}`"
        return named if text in (path, PurePosixPath(path).name) else f"{text} ({named})"

    return _LINK.sub(rewrite, markdown)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/".join(parts)


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────────


def _presets() -> list[str]:
    """Those that are written for GPUs of the catalogue."""
    used = {spec.preset for spec in gpus()}
    return [name for name in options("nli", "hardware") if name in used]


def gpu_list() -> str:
    """Every GPU, by architecture."""
    parts = [
        "# GPUs\n",
        f"All {len(gpus())} GPUs of the catalogue. Rates are dense, in TFLOP/s, as published;",
        "memory is what a program sees. `trainfit check --gpu SLUG` shows one,",
        "`trainfit plan nli --gpu SLUG` plans for it.\n",
    ]
    for kind in dict.fromkeys(spec.architecture for spec in gpus()):
        parts += [f"## {kind}\n", _table(spec for spec in gpus() if spec.architecture == kind), ""]
    return "\n".join(parts)


def preset_page(name: str) -> str:
    """A preset: the GPUs that it is for, what they can do, and what it sets."""
    rows = [spec for spec in gpus() if spec.preset == name]
    parts = [
        f"# hardware={name}\n",
        "The settings of this preset, and the GPUs that it was written for. A preset pins what it",
        "sets; what you override beats it, and `hardware=auto` plans instead.\n",
        "## GPUs\n",
        _table(iter(rows)),
        "",
    ]
    if targets := [spec for spec in rows if spec.mfu_good and spec.mfu_excellent]:
        parts += ["## MFU of a small GPT\n", "| GPU | good | excellent | batch size |"]
        parts += ["|---|---|---|---|"]
        parts += [f"| {s.slug} | {_range(s.mfu_good)}% | {_range(s.mfu_excellent)}% | "
                  f"{_range(s.batch_advice)} |" for s in targets]  # fmt: skip
        parts.append("\nPercent of the dense peak, by the tuning guide; the batch is advice.\n")
    each = {task: layer(task, "hardware", name) for task in _TASKS}
    keys = dict.fromkeys(key for values in each.values() for key in values)
    parts += ["## Settings\n", f"| key | {' | '.join(_TASKS)} |", "|---|---|---|---|"]
    for key in keys:
        cells = (_said(each[task][key]) if key in each[task] else "" for task in _TASKS)
        parts.append(f"| `{key}` | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _table(specs: Iterator[GpuSpec]) -> str:
    lines = [
        "| GPU | GiB | GB/s | bf16 | fp16 | TF32 | fp32 | preset |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for spec in specs:
        rates = (spec.peak_tflops(kind) for kind in ("bf16", "fp16", "tf32", "fp32"))
        cells = " | ".join("–" if rate is None else f"{rate:g}" for rate in rates)
        preset = spec.preset or ""
        lines.append(
            f"| `{spec.slug}` | {spec.memory_gib:g} | {spec.bandwidth_gbs:g} | {cells} | {preset} |"
        )
    return "\n".join(lines)


def _range(pair: tuple[int, int] | None) -> str:
    return "–" if pair is None else f"{pair[0]}–{pair[1]}"


def _said(value: Any) -> str:
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


# ── the notebook ──────────────────────────────────────────────────────────────────────────────


def notebook_page(path: Path) -> str:
    """A notebook's cells as a page, without what they print."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({path.name})\n"
