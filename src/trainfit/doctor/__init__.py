"""The doctor: what is wrong with a machine, a log or a run, and the steps that mend it.

    examine(gather())                 the machine, as it is now
    read_log(Path("train.log"))       a log, of trainfit or anything else on torch
    examine_run(Path("runs/…"))       a run folder: what was planned against what happened

A check is a small pure function over facts gathered beforehand; a sign in a log is a row of a
table. The troubleshooting page is made from both.
"""

from trainfit.doctor.facts import Facts, gather
from trainfit.doctor.finding import Finding, is_healthy
from trainfit.doctor.host_checks import examine
from trainfit.doctor.logs import diagnose_text, read_log
from trainfit.doctor.run_checks import examine_run

__all__ = [
    "Facts",
    "Finding",
    "diagnose_text",
    "examine",
    "examine_run",
    "gather",
    "is_healthy",
    "read_log",
]
