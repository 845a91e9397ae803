import copy

import pytest

from trainfit.core.errors import BadConfig, BadInput, RunFailed, TrainfitError


@pytest.mark.parametrize(
    "error",
    [BadInput("x is 3", "give 4"), RunFailed("it broke", ""), BadConfig([BadInput("a", "b")] * 2)],
)
def test_an_error_of_another_process_arrives_as_it_was(error: TrainfitError):
    back = copy.copy(error)  # by the protocol that processes use
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert (back.what, back.fix, back.exit_code) == (error.what, error.fix, error.exit_code)
