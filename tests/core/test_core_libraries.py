"""Libraries that transformers imports for one function are imported by its first call."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from trainfit.core.libraries import import_generation
import_generation()
import transformers.modeling_utils
assert "scipy" not in sys.modules and "sklearn" not in sys.modules
from transformers.loss import loss_for_object_detection as loss
from transformers.generation import candidate_generator as candidates
assert loss.is_scipy_available() and candidates.is_sklearn_available()
print(loss.linear_sum_assignment([[1, 2], [2, 0]])[1].tolist())
print(candidates.roc_curve([0, 1], [0.2, 0.8])[1].tolist())
"""


@pytest.mark.soak
def test_scipy_and_scikit_learn_are_imported_by_the_first_call() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert said.stdout.splitlines() == ["[0, 1]", "[0.0, 1.0, 1.0]"], said.stderr
