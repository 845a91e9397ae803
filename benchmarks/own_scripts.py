"""Scripts of other libraries alone and by `trainfit run`, whole processes in turns.

`plain_script.py` is run as it is, `python plain_script.py …`, and as `trainfit run -- python
plain_script.py …`. Speeds are those of the second half of its steps, by its own clock; seconds of
the training and of the whole process, in which turns, captures and the start count, come too.
What each change gave is trainfit's own word, measured in the first half.

python benchmarks/own_scripts.py --out FILE [--only bert …] [--rounds 1] [--steps 1000]
    [--alone-steps 250] [--tiny]

The script alone has no turns and captures to pay back: with `--alone-steps` it takes fewer steps,
and its time for as many as under trainfit is worked out at its own speed.

Models and lengths are those of `unpadded.py`, which also measures changes one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from trainfit.core import codec
from trainfit.integrations.script_hooks import chosen, run_sped_up
from unpadded import CASES, config_of, cross_encoder, device, draw_lengths, versions

SCRIPT = Path(__file__).with_name("plain_script.py")


def write_folder(case: str, folder: Path, given: argparse.Namespace) -> None:
    """Write the model and the data of a script."""
    import torch

    folder.mkdir(parents=True)
    sizes = draw_lengths(case, given.batch * given.steps, tiny=given.tiny)
    draw = torch.Generator().manual_seed(1)
    config = config_of(case, tiny=given.tiny, dropout=True, num_labels=3)
    if case == "cross-encoder":
        cross_encoder(case, given, exact=False).save_pretrained(str(folder))
        words = config.vocab_size - 5

        def text(size: int) -> str:
            found = torch.randint(words, (size,), generator=draw).tolist()
            return " ".join(f"w{one}" for one in found)

        pairs = [(text(10), text(max(1, size - 13)), at % 2) for at, size in enumerate(sizes)]
        (folder / "pairs.json").write_text(json.dumps(pairs))
        return
    config.save_pretrained(folder)
    rows = [
        {
            "input_ids": torch.randint(5, config.vocab_size, (size,), generator=draw).tolist(),
            "labels": at % 3,
        }
        for at, size in enumerate(sizes)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))


def run(case: str, folder: Path, given: argparse.Namespace, *, by_trainfit: bool) -> dict[str, Any]:
    """Run the script once; return its figures and the seconds of its process."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    kind = "cross-encoder" if case == "cross-encoder" else "trainer"
    steps = given.steps if by_trainfit else min(given.steps, given.alone_steps or given.steps)
    words = [sys.executable, str(SCRIPT), str(folder), str(result), "--steps", str(steps)]
    words += ["--kind", kind, "--padding", CASES[case][1], "--batch", str(given.batch)]
    began, more = time.perf_counter(), {}
    if by_trainfit:
        code, found = run_sped_up(words, chosen(None), dry_run=False)
        more = {} if found is None else {"said": found.line(), "changes": codec.encode(found)}
    else:
        code = subprocess.run(words, check=False).returncode
    seconds = time.perf_counter() - began
    if code or not result.exists():
        return {"error": f"it ended with {code}"} | more
    figures = json.loads(result.read_text()) | {"steps": steps, "process_seconds": seconds}
    left = (given.steps - steps) * given.batch / figures["samples_per_second"]
    whole = {name: figures[name] + left for name in ("training_seconds", "process_seconds")}
    return figures | {"for_all_steps": whole} | more


def compare(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Gains of each script: of its steps, its training and its process, by medians."""
    found: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        sides = [
            [r for r in rows if r["case"] == case and r["way"] == way and "error" not in r]
            for way in ("alone", "run")
        ]
        if not all(sides):
            continue
        speeds = [median(row["samples_per_second"] for row in side) for side in sides]
        found[case] = {"steps": speeds[1] / speeds[0]}
        for name in ("training_seconds", "process_seconds"):
            alone, fast = (median(row["for_all_steps"][name] for row in side) for side in sides)
            found[case][name.removesuffix("_seconds")] = alone / fast
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--alone-steps", type=int, help="of the script alone; as many if left out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.batch = 80, 4
    roots = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(root).resolve()) for root in roots)
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/own_scripts.py", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device(),
        "versions": versions(),
        "rows": rows,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for case in given.only:
            folder = Path(scratch) / case
            write_folder(case, folder, given)
            for round_ in range(given.rounds):
                for way in ("alone", "run"):
                    found = run(case, folder, given, by_trainfit=way == "run")
                    rows.append({"case": case, "way": way, "round": round_} | found)
                    record["gains"] = compare(rows)
                    given.out.write_text(json.dumps(record, indent=1) + "\n")
                    print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(record["gains"]), flush=True)


if __name__ == "__main__":
    main()
