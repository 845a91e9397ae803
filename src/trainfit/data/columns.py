"""Recognise the columns of a table of texts by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from trainfit.core.errors import BadInput

AUTO = "auto"
"""Wanted name of a column that its role tells."""
_PAIRED = """
premise hypothesis, sentence1 sentence2, sentence_1 sentence_2, sentence_a sentence_b,
text1 text2, text_1 text_2, text_a text_b, question1 question2, question answer, question passage,
question context, question sentence, query passage, query document, query answer, anchor positive,
first second
"""
PAIRS = [(first, second) for first, second in map(str.split, _PAIRED.split(","))]
"""Names of the two columns of a pair of texts, the likeliest first."""
_NAMES = {
    "text": """
text texts sentence sentences review reviews review_text reviewtext content comment comment_text
comments body message messages post posts tweet tweets tweet_text full_text document documents
utterance query question abstract article description headline title summary input inputs string
sms v2""",
    "label": """
label labels sentiment target targets class classes category categories intent topic emotion tag
rating ratings score scores stars star polarity y output label_id class_id coarse_label fine_label
is_spam spam toxic v1""",
    "tokens": "tokens words token word",
    "tags": "ner_tags tags pos_tags chunk_tags labels ner ner_labels label tag",
}
NAMES: Mapping[str, Sequence[str]] = {role: names.split() for role, names in _NAMES.items()}
"""Names of each role in lower case, the likeliest first; `second` is found with its `text`."""
_IDLE = re.compile(r"(unnamed.*|index|idx|id|row|row_?id|level_0|__index_level_\d+__|)")
"""Numbers of rows, which libraries write as a column; never taken unless named."""
_NAME = re.compile(r"(?!\d+$)[^\W\d][\w .:/()#+-]{0,39}")


def choose_columns(
    found: Sequence[str], wanted: Mapping[str, str], place: str, keys: Mapping[str, str]
) -> dict[str, str]:
    """Choose a column for each wanted role: the named one, or with `auto` the one its name tells.

    A role that no name tells gets the only column that is left. `keys` are the configuration keys
    that name the columns; the error shows them.
    """
    chosen = {role: name for role, name in wanted.items() if name != AUTO}
    for name in chosen.values():
        if name not in found:
            raise BadInput(f"{place} has no column {name}", shown_columns(found))
    usable = [name for name in found if not _IDLE.fullmatch(_folded(name))]
    if wanted.get("second") == AUTO:
        chosen |= _pair(usable, chosen.get("text"))
    for role in wanted:
        left = [name for name in usable if name not in chosen.values()]
        if role not in chosen and (told := _told(left, role)) is not None:
            chosen[role] = told
    missing = [role for role in wanted if role not in chosen]
    left = [name for name in usable if name not in chosen.values()]
    left = [name for name in left if len(wanted) > 1 or not _told([name], "label")]
    if len(missing) == len(left) == 1:
        chosen[missing.pop()] = left[0]
    if missing:
        paired = "text" in missing and "second" not in wanted and _pair(usable, None)
        fix = f"{shown_columns(found)}; write {_words(chosen, wanted, left, keys)}"
        fix += ", or take the job pairs" * bool(paired)
        raise BadInput(f"{place}: no column is recognised as {' or '.join(missing)}", fix)
    for name in chosen.values():
        if list(found).count(name) > 1:
            raise BadInput(f"{place} has the column {name} twice", "rename one of them")
    return {role: chosen[role] for role in wanted}


def shown_columns(found: Sequence[str]) -> str:
    """Sentence that lists the columns, unless the first line is no header but data."""
    names = [name for name in found if name]
    if not all(map(_is_name, names)):
        return "its first line does not look like names: begin with a line such as text,label"
    return f"its columns are {', '.join(names[:30]) or 'without names'}"


def shown_name(name: str) -> str:
    """Show the name of a column, unless it may be a text."""
    return name if _is_name(name) else "(a long name)"


def _is_name(cell: str) -> bool:
    """Tell the name of a column from a text, which must not be shown: a file may lack a header."""
    return bool(_NAME.fullmatch(cell)) and len(cell.split()) <= (3 if cell.istitle() else 2)


def _pair(usable: Sequence[str], text: str | None) -> dict[str, str]:
    """Find the two columns of a pair of texts, or the one that goes with the named one."""
    there = {_folded(name): name for name in reversed(usable)}
    for first, second in PAIRS:
        if first in there and second in there and text in (None, there[first]):
            return {"text": there[first], "second": there[second]}
    return {}


def _told(columns: Iterable[str], role: str) -> str | None:
    """Find the column whose name, or the last part of it, tells the role."""
    names = list(reversed(list(columns)))
    there = {_folded(name.rpartition(".")[2]): name for name in names}
    there |= {_folded(name): name for name in names}
    return next((there[name] for name in NAMES.get(role, ()) if name in there), None)


def _folded(name: str) -> str:
    return re.sub(r"[\s.-]+", "_", name.strip().lower())


def _words(
    chosen: Mapping[str, str],
    wanted: Mapping[str, str],
    left: Sequence[str],
    keys: Mapping[str, str],
) -> str:
    """Words that name the columns, with those left as examples for the missing ones."""
    from trainfit.conf.composition import as_word

    free = iter(left if all(map(_is_name, left)) else ())
    names = {role: chosen.get(role) or next(free, "NAME") for role in wanted}
    return " ".join(as_word(keys[role], name) for role, name in names.items())
