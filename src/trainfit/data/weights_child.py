"""Weights that were pickled, written again as safetensors, in a process that may die of it.

Run as a script: `python -P weights_child.py MEMORY`, with a request in JSON on its input:
{"files": [[source, target], ...]}. It answers with one line of JSON: {"done": true};
{"global": name} where the pickle asks for something that is not weights; or {"damaged": true}.
torch.load runs with weights_only=True, which builds tensors and calls nothing else.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

_ROOM = 4
"""The tensors of a file may be so many times as large as it: tied ones are written twice."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,80})")


def main() -> None:
    """Answer one request."""
    _limit_memory(int(sys.argv[1]))
    request = json.loads(sys.stdin.readline())
    try:
        for source, target in request["files"]:
            _convert(Path(source), Path(target))
        answer: dict[str, Any] = {"done": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the file is not what it should be
        found = _GLOBAL.search(str(error))
        answer = {"global": found[1]} if found else {"damaged": True}
    print(json.dumps(answer), flush=True)


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, or a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _convert(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    mapped = zipfile.is_zipfile(source)
    state = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(state, dict) or not state:
        raise ValueError("no state dict")
    # A tensor of a few bytes may claim any shape by strides of 0.
    left = _ROOM * source.stat().st_size
    tensors, seen = {}, set()
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError("no state dict")
        left -= tensor.numel() * tensor.element_size()
        if left < 0:
            raise ValueError("more than the file holds")
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().contiguous()
        # Of tensors that share memory each is written: a tied model ties them again.
        tensors[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    save_file(tensors, target, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
