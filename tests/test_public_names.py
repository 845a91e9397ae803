import subprocess
import sys

import pytest

import trainfit


@pytest.mark.parametrize("name", trainfit.__all__)
def test_a_public_name_is_there(name: str):
    assert getattr(trainfit, name)
    assert name in dir(trainfit)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'detekt'"):
        trainfit.detekt  # noqa: B018


def test_names_are_loaded_when_they_are_used():
    code = (
        "import sys, trainfit\n"
        "assert not {'torch', 'trainfit.hardware'} & set(sys.modules)\n"
        "from trainfit import detect, lookup\n"
        "assert 'torch' not in sys.modules and 'trainfit.hardware' in sys.modules\n"
        "assert lookup('NVIDIA H200').slug == 'h200-sxm-141gb'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
