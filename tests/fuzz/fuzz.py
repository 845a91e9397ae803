"""`make fuzz`: hostile commands and files, by the thousand, each of them reproducible."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fuzz_case import KINDS, deal  # noqa: E402
from fuzz_running import LIMIT, Fuzzer, Outcome  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these")
    parser.add_argument("--case", metavar="KIND/NUMBER", help="one case, and what it printed")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds")
    parser.add_argument("--once", action="store_true", help="confirm no failure in a new process")

    parser.add_argument("--quick", action="store_true", help="never ask the planner itself")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for the cases that fail")
    given = parser.parse_args()
    kinds = given.kind or list(KINDS)
    names = deal(given.cases, kinds)
    if given.case:
        kind, _, number = given.case.partition("/")
        names = [(kind, int(number))]
    with tempfile.TemporaryDirectory(prefix="trainfit-fuzz-") as temporary:
        work = given.keep or Path(temporary)
        fuzzer = Fuzzer(work, given.seed, given.limit, confirm=not given.once, plan=not given.quick)
        began = time.monotonic()
        outcomes = []
        for outcome in fuzzer.run_all(names, 1 if given.case else given.workers):
            outcomes.append(outcome)
            if outcome.fault or given.case:
                print(_line(outcome, given.seed), flush=True)
    print(_summary(outcomes, time.monotonic() - began))
    return int(any(outcome.fault for outcome in outcomes))


def _line(outcome: Outcome, seed: int) -> str:
    words = [word if len(word) < 80 else f"{word[:77]}..." for word in outcome.argv]
    told = (outcome.shown.strip().splitlines() or [""])[-1][:300]
    return (
        f"{outcome.fault or 'as it should'}: make fuzz SEED={seed} CASE={outcome.name}\n"
        f"    trainfit {shlex.join(words)!r}\n    {outcome.seconds:.1f} s, {told!r}"
    )


def _summary(outcomes: list[Outcome], seconds: float) -> str:
    lines = [f"{'kind':22}{'cases':>7}{'done':>7}{'found':>7}{'refused':>9}{'wrong':>7}{'s':>8}"]
    for kind in dict.fromkeys(outcome.name.partition("/")[0] for outcome in outcomes):
        of_kind = [o for o in outcomes if o.name.startswith(f"{kind}/")]
        codes = Counter(outcome.code for outcome in of_kind)
        wrong = sum(outcome.fault is not None for outcome in of_kind)
        spent = sum(outcome.seconds for outcome in of_kind)
        lines.append(
            f"{kind:22}{len(of_kind):7}{codes[0]:7}{codes[1]:7}{codes[2]:9}{wrong:7}{spent:8.1f}"
        )
    faults = Counter(outcome.fault for outcome in outcomes if outcome.fault)
    told = ", ".join(f"{count} × {fault}" for fault, count in faults.most_common())
    return "\n".join([*lines, f"{len(outcomes)} cases in {seconds:.0f} s: {told or 'all right'}"])


if __name__ == "__main__":
    sys.exit(main())
