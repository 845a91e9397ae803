import copy
import re
from pathlib import Path

import pytest

import trainfit
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


READ = re.compile(
    r'"([^"\n]+)" (?:not )?in \w'
    r'|\.(?:startswith|endswith|removeprefix|removesuffix|r?partition)\("([^"\n]+)"\)'
)
FOREIGN = {"no such": "SQLite's error", "override /": "Hydra's defaults lists"}


def test_no_program_reads_a_sentence_that_the_package_wrote():
    """What one place words, no other takes apart; a kind is compared as a whole."""
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(trainfit.__file__).parent.rglob("*.py")
    )
    read = {one or other for one, other in READ.findall(sources)}
    phrases = {phrase for phrase in read - set(FOREIGN) if " " in phrase.strip()}
    assert len(phrases) > 5  # of what other programs write
    assert [phrase for phrase in phrases if sources.count(phrase) > 1] == []
