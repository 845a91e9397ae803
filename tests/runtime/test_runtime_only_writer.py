"""Nothing outside runtime/ writes torch's process-wide switches or the environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trainfit

SOURCE = Path(trainfit.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

SETTERS = {
    "manual_seed_all",
    "set_num_threads",
    "set_num_interop_threads",
    "use_deterministic_algorithms",
    "set_float32_matmul_precision",
    "enable_flash_sdp",
    "enable_math_sdp",
    "enable_mem_efficient_sdp",
    "enable_cudnn_sdp",
    "sdpa_kernel",
    "empty_cache",
    "_set_allocator_settings",
    "set_per_process_memory_fraction",
    "set_default_dtype",
    "set_default_device",
}
# A generator of one's own may be seeded; the modules' generators belong to the process.
SEEDERS = {"seed", "manual_seed"}
SEEDED_MODULES = ("torch.", "random.", "numpy.")
ENVIRONMENT = {
    *(f"os.environ.{name}" for name in ("update", "setdefault", "pop", "popitem", "clear")),
    "os.putenv",
    "os.unsetenv",
}


class Writes(ast.NodeVisitor):
    """Collects the lines of a module that write what belongs to the process."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.lines: list[int] = []

    def path(self, node: ast.expr) -> str:
        """The dotted name of `node` with aliases resolved, or the last part of it."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.path(node.value)}.{node.attr}"
        return ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self.names[alias.asname] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.alias(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.alias(node.target, node.value)
        self.generic_visit(node)

    def alias(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
            self.names[target.id] = self.path(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and self.path(node.target) == "os.environ":
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        written = not isinstance(node.ctx, ast.Load)
        if written and (path.startswith("torch.backends.") or path == "os.environ"):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load) and self.path(node.value) == "os.environ":
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = self.path(node.func)
        name = path.rpartition(".")[2]
        owner = self.path(node.args[0]) + "." if node.args else ""
        if (
            name in SETTERS
            or path in ENVIRONMENT
            or (name in SEEDERS and path.startswith(SEEDED_MODULES))
            or (path in ("setattr", "delattr") and owner.startswith("torch.backends."))
        ):
            self.lines.append(node.lineno)
        self.generic_visit(node)


def writes(code: str) -> list[int]:
    """The lines of `code` that write what belongs to the process."""
    visitor = Writes()
    visitor.visit(ast.parse(code))
    return visitor.lines


def in_runtime(file: Path) -> bool:
    return (SOURCE / "runtime") in file.parents


def test_only_runtime_writes() -> None:
    found = [
        f"{file.relative_to(SOURCE)}:{line}"
        for file in FILES
        if not in_runtime(file)
        for line in writes(file.read_text())
    ]
    assert found == [], "these belong into trainfit/runtime"


def test_the_checker_sees_what_runtime_does() -> None:
    seen = {file.name for file in FILES if in_runtime(file) and writes(file.read_text())}
    assert {"environment.py", "switches.py"} <= seen


PLANTED = [
    "import torch\ntorch.backends.cudnn.benchmark = True",
    "import torch\ntorch.backends.cuda.matmul.allow_tf32 |= True",
    "import torch\ntorch.backends.cudnn.benchmark: bool = True",
    "import torch\n(a, torch.backends.cudnn.benchmark) = 1, True",
    "import torch as t\nt.backends.fp32_precision = 'tf32'",
    "from torch.backends import cudnn\ncudnn.deterministic = True",
    "import torch\ncudnn = torch.backends.cudnn\ncudnn.deterministic = True",
    "import torch\ncudnn: object = torch.backends.cudnn\ncudnn.deterministic = True",
    "import torch\nsetattr(torch.backends.cudnn, 'benchmark', True)",
    "import torch\nsetattr(torch.backends, 'fp32_precision', 'tf32')",
    "import os\nos.environ['A'] = 'b'",
    "import os\nos.environ['A'] += 'b'",
    "import os\ndel os.environ['A']",
    "import os\nos.environ |= {}",
    "from os import environ\nenviron |= {}",
    "from os import environ\nenviron['A'] = 'b'",
    "import os\nos.environ = {}",
    *(f"import os\nos.environ.{name}" for name in ("update(A='b')", "setdefault('A', 'b')")),
    *(f"import os\nos.environ.{name}" for name in ("pop('A')", "popitem()", "clear()")),
    "import os\nos.putenv('A', 'b')",
    "import os\nos.unsetenv('A')",
    *(f"import torch\ntorch.any.{name}(1)" for name in sorted(SETTERS)),
    *(f"from torch.any import {name} as f\nf(1)" for name in sorted(SETTERS)),
    "import torch\ntorch.manual_seed(1)",
    "import torch\ntorch.cuda.manual_seed(1)",
    "from torch import manual_seed\nmanual_seed(1)",
    "import random\nrandom.seed(1)",
    "import numpy as np\nnp.random.seed(1)",
    "def f():\n    import torch\n    with torch.nn.attention.sdpa_kernel([]):\n        pass",
]


@pytest.mark.parametrize("code", PLANTED)
def test_the_checker_catches_a_planted_write(code: str) -> None:
    assert len(writes(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nx = torch.backends.cudnn.benchmark",
        "import torch\ntorch.Generator().manual_seed(1)\ntorch.set_rng_state(state)",
        "import os\nx = os.environ['A'] or os.environ.get('A')",
        "import random\nrng = random.Random(1)\nrng.seed(2)",
        "self.backends.cudnn = 1",
        "setattr(record, 'name', 1)",
    ],
)
def test_the_checker_lets_reading_pass(code: str) -> None:
    assert writes(code) == []


def unnamed_encodings(code: str) -> list[int]:
    """The lines that read or write a text in whatever encoding the machine's locale has."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and ast.unparse(node.func.value) != "files"
        and not any(word.arg == "encoding" for word in node.keywords)
        and not any("utf" in ast.unparse(given) for given in node.args)
    ]


def test_no_file_depends_on_the_locale() -> None:
    """A tokenizer's settings read as Latin-1 on a machine with LANG=tr_TR lost their letters."""
    found = [
        f"{file.relative_to(SOURCE)}:{line}"
        for file in FILES
        for line in unnamed_encodings(file.read_text("utf-8"))
    ]
    assert found == []
    assert unnamed_encodings("path.read_text()\npath.write_text(text)") == [1, 2]
    assert unnamed_encodings("path.read_text('utf-8')\nfiles.read_text(path)") == []
