"""Hooks of mkdocs: pages made from other files, the order of the menu, and links.

The API reference comes from the docstrings of `trainfit.__all__`, the pages of GPUs from the
catalogue and the presets, and the notebook is shown as a page. A page without a place in the order
is listed last.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from html import escape
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import trainfit
from trainfit.cli.main import COMMANDS
from trainfit.conf import layer, options
from trainfit.hardware.catalogue import GpuSpec, gpus
from trainfit.hardware.model_shapes import model_shapes

ROOT = Path(__file__).parent.parent
_TASKS = ("nli", "textclass", "gpt")
_GUIDES = (
    *("tuning", "memory", "batch-size", "ladder", "time-to-result", "speed", "gpt"),
    *("many-gpus", "estimate"),
    *("troubleshooting", "safety", "integrations", "hardware-optimizer"),
    *("platforms", "compat", "models"),
)
_PYTHON = ("write-a-job",)
_INSIDE = ("architecture", "sources")
_COUNTS = {
    "model": "",
    "language model": ", with the output layer",
    "classifier without embeddings": ", a classifier without embeddings",
}
"""Weights that a published number counts, where they are not those of the second column."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages in order."""
    there = {path.stem: path.name for path in Path(config.docs_dir).glob("*.md")}

    def take(names: tuple[str, ...]) -> list[str]:
        return [there.pop(name) for name in names if name in there]

    there.pop("index", None)
    groups: dict[str, list[Any]] = {
        "Start": [{"Home": "index.md"}, {"On Colab": "colab-t4.md"}],
        "Commands": take(tuple(COMMANDS)),
        "Guides": take(_GUIDES),
        "Python": [{"API": "api.md"}, *take(_PYTHON)],
        "GPUs": ["gpus/index.md", *(f"gpus/{name}.md" for name in _presets())],
        "Inside": take(_INSIDE),
    }
    groups["More"] = sorted(there.values())
    config.nav = [{title: pages} for title, pages in groups.items() if pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {
        "api.md": api_page(),
        "colab-t4.md": notebook_page(ROOT / "docs" / "colab-t4.ipynb"),
        "gpus/index.md": gpu_list(),
        **{f"gpus/{name}.md": preset_page(name) for name in _presets()},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_more: Any) -> str:
    """Turn links to files that are in the repository and not on the site into file names."""
    markdown = markdown.replace("<!-- the catalogue -->", model_list())
    known = {file.src_uri for file in files}
    base = PurePosixPath("docs")
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


# ── API ──────────────────────────────────────────────────────────────────────────────────────


def api_page() -> str:
    """Reference of the public names, from their signatures and docstrings."""
    groups: dict[str, list[str]] = {
        "Commands": [],
        "Functions": [],
        "Classes": [],
        "Exceptions": [],
    }
    for name in sorted(set(trainfit.__all__) - {"__version__"}):
        groups[_group(name)].append(_entry(name))
    parts = [
        "# Python API\n",
        "Everything here is imported from `trainfit`, and loaded when it is first used.\n",
    ]
    groups["Records that they return"] = [_record(kind) for kind in _returned()]
    for title, entries in groups.items():
        parts += [f"## {title}\n", *entries] if entries else []
    return "\n".join(parts)


def _group(name: str) -> str:
    value = getattr(trainfit, name)
    if inspect.isclass(value):
        return "Exceptions" if issubclass(value, BaseException) else "Classes"
    return "Commands" if name in COMMANDS else "Functions"


def _entry(name: str) -> str:
    value = getattr(trainfit, name)
    parts = [f"### trainfit.{name}\n", _signature(f"trainfit.{name}", value), _docstring(value)]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                parts += [_signature(method, function), _docstring(function)]
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """Code block with the signature, one parameter a line where it is long."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    text = _short(f"{name}{signature}", name)
    if len(text) > 88:
        lines = [_short(f"    {parameter},\n") for parameter in _parameters(signature)]
        text = f"{name}(\n{''.join(lines)}){text[text.rindex(')') + 1 :]}"
    return f"```python\n{text}\n```\n"


def _short(text: str, name: str = "") -> str:
    """Signature without quotes, and without the modules of its types."""
    return name + re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", text[len(name) :]).replace(
        "'", ""
    )


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    """Parameters as they are written, with the star that starts keywords."""
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        yield str(parameter)


def _returned() -> list[type]:
    """Dataclasses that the public functions return, in order of their names."""
    functions = (getattr(trainfit, name) for name in trainfit.__all__)
    named = {str(inspect.get_annotations(f).get("return")) for f in functions if callable(f)}
    loaded = (m for name, m in list(sys.modules.items()) if name.startswith("trainfit."))
    kinds = {name: kind for module in loaded for name, kind in vars(module).items()}
    return [kind for name, kind in sorted(kinds.items()) if name in named and is_dataclass(kind)]


def _record(kind: type) -> str:
    """Fields of a dataclass with the strings that stand below them."""
    [tree] = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    rows = ["| field | type | |", "|---|---|---|"]
    for line, below in pairwise([*tree.body, ast.Pass()]):
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.target).startswith("_"):
            said = ast.literal_eval(below.value) if _is_string(below) else ""
            kinds = escape(ast.unparse(line.annotation))
            cells = (
                f"`{ast.unparse(line.target)}`",
                f"<code>{kinds}</code>",
                " ".join(said.split()),
            )
            rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join([f"### {kind.__name__}\n", _docstring(kind), *rows, ""])


def _is_string(line: ast.stmt) -> TypeGuard[ast.Expr]:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def _docstring(value: Any) -> str:
    value = type(value).__call__ if inspect.ismodule(value) else value  # a package that is called
    return (inspect.getdoc(value) or "") + "\n"


# ── GPUs ──────────────────────────────────────────────────────────────────────────────────────


def _presets() -> list[str]:
    """Presets that belong to a GPU of the catalogue."""
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


def model_list() -> str:
    """Every published model of the catalogue, by family."""
    shapes = [shape for shape in model_shapes() if shape.hub is not None]
    parts = [f"{len(shapes)} models:\n"]
    for family in dict.fromkeys(shape.config["model_type"] for shape in shapes):
        parts += [f"### {family}\n", "| name | on the hub | parameters | published | source |"]
        parts += ["|---|---|---|---|---|"]
        for shape in (each for each in shapes if each.config["model_type"] == family):
            published = f"{shape.published}{_COUNTS[shape.published_counts]}"
            cells = (f"`{shape.slug}`", shape.hub, f"{shape.parameters:,}", published, shape.source)
            parts.append(f"| {' | '.join(map(str, cells))} |")
        parts += [""]
    return "\n".join(parts)


def preset_page(name: str) -> str:
    """Page of a preset: its GPUs with their rates, and the values that it sets."""
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
    """Cells of a notebook as a page, without outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({path.name})\n"
