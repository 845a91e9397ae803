"""Files of a model, from a local folder or the hub: only data is taken from them.

Fields of a config by which transformers would import, download or replace something are dropped.
Weights are safetensors; a pytorch_model.bin is converted once in a process of its own, and any
other pickle is never opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.core import caches, codec
from trainfit.core.errors import BadInput, RunFailed, reason, refusing
from trainfit.core.files import cache_folder, check_regular, checksum, read_text
from trainfit.data.columnar import CHILD
from trainfit.data.hub import hub_file
from trainfit.hardware.model_shapes import check_fields, model_shape, read_model_config

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS = 900.0
"""Longest time of one conversion."""
_MEMORY = 24 << 30
"""Bytes of address space for importing torch, besides the weights."""
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_NOT_TAKEN = re.compile(
    r"auto_map|_name_or_path|name_or_path|_commit_hash|trust_remote_code|custom_pipelines"
    r"|_?(?:attn|experts)_implementation\w*|use_kernels|kernel_config|fusion_config"
    r"|distributed_config|device_map|transformers_weights|gguf_file|quantization_config"
    r"|backbone|backbone_kwargs|use_timm_backbone|use_pretrained_backbone"
)
"""Fields of a config that name code, kernels, other files or other models."""
_TOKENIZER_CLASS = re.compile(
    r"(?!Auto)\w*Tokenizer(?:Fast)?|\w*(?:Tokenizers|Python|Piece)Backend"
)


def read_config(place: str) -> dict[str, Any]:
    """Read and check the fields of a model's config.json, from a folder or the hub."""
    if Path(place).is_dir():
        fields = read_model_config(Path(place))
    else:
        with refusing(partial(unreadable, place)):
            path = hub_file(place, "config.json")
            if path is None:
                raise OSError("it has no config.json")
            fields = codec.read_object(path)
        check_fields(fields, place)
    if "model_type" not in fields:
        fix = "give a folder with a config.json"
        raise BadInput(f"no model_type in the config of {place}", fix)
    return fields


def unreadable(place: str, reason: str) -> BadInput:
    """Word that a model cannot be read, for an unknown name with the nearest ones."""
    if Path(place).is_dir():
        return BadInput(f"cannot load a model from {place}: {reason}", "give another folder")
    try:
        model_shape(place)
    except BadInput as unknown:
        return BadInput(f"{unknown.what}, and the hub gave none: {reason}", unknown.fix)
    return BadInput(
        f"cannot load {place} from the hub: {reason}", "check the network, or give a local folder"
    )


def plain_config(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Keep the fields of a config, and of its parts, that describe a model."""
    if fields.get("quantization_config") is not None:
        raise BadInput(f"{place} has quantized weights", "give the model they were made of")
    if str(fields.get("model_type")).startswith("timm"):  # its config names models to download
        raise BadInput(f"{place} is a model of images", "give a model of text")
    return _plain(fields)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if not _NOT_TAKEN.fullmatch(str(name))
    }


def tokenizer_files(place: str) -> dict[str, str]:
    """Find the files in a tokenizer's folder that its settings name with outside paths.

    transformers saves the path that a vocabulary was read from, and would read it there again; the
    file of that name in the folder is used. Other outside files are refused, and so is a class that
    is no tokenizer's.
    """
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "config.json"):
        settings = _settings(place, file)
        kind = settings.get("tokenizer_class")
        if isinstance(kind, str) and not _TOKENIZER_CLASS.fullmatch(kind):
            fix = "name a tokenizer class of transformers, or leave tokenizer_class out"
            raise BadInput(f"{file} of {place} names {kind[:60]!r} as its tokenizer", fix)
        for key, value in settings.items():
            outside = any(Path(name).name != name for name in _names(value))
            if key.endswith(("_file", "_files")) and outside:
                own = fetch(place, Path(value).name) if isinstance(value, str) else None
                if own is None:
                    fix = f"leave {key[:40]} out: transformers knows the names of its files"
                    raise BadInput(f"{file} of {place} names a file outside of its folder", fix)
                found[key] = str(own)
    return found


def _names(value: Any) -> list[str]:
    """Collect all strings in a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = list(value.values()) if isinstance(value, dict) else value
    return [name for part in inner for name in _names(part)] if isinstance(inner, list) else []


def _settings(place: str, file: str) -> dict[str, Any]:
    try:
        path = fetch(place, file)
        # Plain JSON, because transformers writes integers of 100 bits.
        found = {} if path is None else json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}  # transformers cannot read it either
    return found if isinstance(found, dict) else {}


def fetch(place: str, name: str) -> Path | None:
    """Find a file in a folder or on the hub; None where it does not exist, OSError offline."""
    if Path(place).is_dir():
        path = Path(place) / name
        return path if path.is_file() else None
    return hub_file(place, name)


def read_weights(place: str) -> dict[str, Tensor]:
    """Read the tensors of a model by name."""
    import safetensors
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in weight_files(place):
        try:
            tensors |= load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            fix = "get another copy of the model"
            raise BadInput(f"{path} is damaged ({reason(error)})", fix) from None
    return tensors


def read_named(place: str, names: set[str]) -> dict[str, Tensor]:
    """Read those tensors of a model that have one of these names; a missing one is left out."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for path in weight_files(place):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names & set(file.keys())}
    return tensors


def weight_shapes(place: str) -> dict[str, tuple[int, ...]]:
    """Read the names and shapes of a model's tensors."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(place):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def weight_files(place: str) -> list[Path]:
    """Find the safetensors files of a model; pickled weights are converted once."""
    if (path := fetch(place, _SAFE)) is not None:
        return [check_regular(path)]
    if (path := fetch(place, f"{_SAFE}.index.json")) is not None:
        return _indexed(place, path, ".safetensors")
    if (path := fetch(place, _PICKLED)) is not None:
        return _converted(place, [check_regular(path)])
    if (path := fetch(place, f"{_PICKLED}.index.json")) is not None:
        return _converted(place, _indexed(place, path, ".bin"))
    others = sorted({p.name for kind in _PICKLES for p in Path(place).glob(kind)})
    beside = "".join(
        f" ({name} is a pickle, which may run any code and is not opened)" for name in others[:1]
    )
    fix = "save the model with save_pretrained, or set model.weights=random"
    raise BadInput(f"no {_SAFE} in {place}{beside}", fix)


def _indexed(place: str, index: Path, ending: str) -> list[Path]:
    """List the files that an index names, all of them in its folder."""
    fix = "get another copy of the model"
    try:
        names = sorted(set(codec.read_object(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"cannot read {index.name} of {place} ({reason(error)})", fix) from None
    found = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(ending):
            raise BadInput(f"{index.name} of {place} names a file outside of the folder", fix)
        path = fetch(place, name)
        if path is None:
            raise BadInput(f"{place} has no {name}, which {index.name} names", fix)
        if not _within(path):
            raise BadInput(f"{name} in {place} is a link to a file outside of the folder", fix)
        found.append(check_regular(path))
    return found


def _within(path: Path) -> bool:
    """True for a file in its folder or in the hub's cache, False for a link to another place."""
    folder, real = path.parent.resolve(), path.resolve()
    own = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return real.parent in (folder, own)


# ── pickled weights ───────────────────────────────────────────────────────────────────────────


def _converted(place: str, files: list[Path]) -> list[Path]:
    """Convert pickled weights to safetensors files, or find them in the cache."""
    content = json.dumps([1, *(checksum(file) for file in files)])
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    folder = cache_folder() / "weights" / key
    targets = [folder / f"{number}.safetensors" for number in range(len(files))]
    if not all(_is_whole(target) for target in targets):
        with caches.building(folder) as made:
            _convert(place, files, [made / target.name for target in targets])
    return targets


def _is_whole(path: Path) -> bool:
    """Check the header of a safetensors file against its size."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except (OSError, safetensors.SafetensorError):
        return False


def _convert(place: str, files: list[Path], targets: list[Path]) -> None:
    pairs = [[str(a), str(b)] for a, b in zip(files, targets, strict=True)]
    request = {"format": "weights", "files": pairs}
    memory = _MEMORY + 8 * sum(file.stat().st_size for file in files)
    try:
        # -P: beside the script lie modules with the names of libraries.
        done = subprocess.run(
            [sys.executable, "-P", str(CHILD), str(memory)],
            input=json.dumps(request) + "\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=_SECONDS,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
        answer = json.loads(done.stdout) if done.stdout else {}
    except (subprocess.TimeoutExpired, ValueError):
        answer = {}
    if answer.get("end"):
        return
    fix = "get the model as safetensors"
    name = f"{files[0].name} of {place}"
    if "global" in answer:
        raise BadInput(f"{name} is not plain weights: it asks for {answer['global']}", fix)
    if "damaged" in answer:
        raise BadInput(f"{name} is damaged, or not plain weights", fix)
    raise RunFailed(f"{name} could not be converted to safetensors", fix)
