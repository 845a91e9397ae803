"""A receipt for a training that another trainer runs."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trainfit.measuring.observing import Observation, observe
from trainfit.records import Receipt

RECEIPT = "trainfit_receipt.json"


class Observing:
    """Observes one training after another, and keeps the last one's receipt."""

    def __init__(self, warm_up: int) -> None:
        """Look at the step after `warm_up` ones."""
        self._warm_up = warm_up
        self._under_way = ExitStack()
        self._seen: Observation | None = None
        weakref.finalize(self, self._under_way.close)

    def let_go(self) -> None:
        """Of what was under way when an error ended it."""
        self._under_way.close()
        self._seen = None

    def begin(self) -> None:
        """Observe from now on."""
        self.let_go()
        self._seen = self._under_way.enter_context(observe(warm_up=self._warm_up))

    def end(self, folder: Path, *, write: bool) -> Receipt | None:
        """The receipt, written to `folder`; None for a training that was too short to look at."""
        self._under_way.close()
        if self._seen is None or self._seen.receipt is None:
            return None
        receipt = replace(self._seen.receipt, run=str(folder))
        if write:
            receipt.save(folder / RECEIPT)
        return receipt
