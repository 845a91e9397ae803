"""Columns of tables: told by their names; read from Parquet files, saved datasets and streams.

These are read in a child process that may crash.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from trainfit.core import codec
from trainfit.core.errors import BadInput, RunFailed, TrainfitError, reason
from trainfit.core.files import cache_folder, check_regular
from trainfit.core.libraries import need

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
sms data v2""",
    "label": """
label labels sentiment target targets class classes category categories intent topic emotion tag
rating ratings score scores stars star polarity y output label_id class_id class_index
coarse_label fine_label gold_label similarity similarity_score relevance is_duplicate is_spam spam
toxic hate accept v1""",
    "tokens": "tokens words token word",
    "tags": "ner_tags tags pos_tags chunk_tags labels ner ner_labels label tag",
}
NAMES: Mapping[str, Sequence[str]] = {role: names.split() for role, names in _NAMES.items()}
"""Names of each role in lower case, the likeliest first; `second` is found with its `text`."""
_IDLE = re.compile(
    r"(unnamed.*|index|idx|(\w+_|q|pair|row|text|user)?id_?\d?|row|level_0|__index.*|_(input|task)_hash|)"
    r"|(n[or]_?|#)"
)
"""Numbers of rows and other ids; never taken unless they are named, or known by their name."""
_COUNTING = re.compile(r"(num(ber)?|n|no|total|mean|avg|average)_")
_NAME = re.compile(r"(?!\d+$)[^\W\d][\w .:/()#+-]{0,39}")


def choose_columns(
    found: Sequence[str], wanted: Mapping[str, str], place: str, keys: Mapping[str, str]
) -> dict[str, str]:
    """Choose a column for each wanted role: the named one, or with `auto` the one its name tells.

    A role that no name tells gets the only column that is left. `keys` are the configuration keys
    that name the columns; the error shows them.
    """
    chosen = {role: name for role, name in wanted.items() if name != AUTO}
    for name in flat(chosen.values(), found):
        if name not in found:
            raise BadInput(f"{place} has no column {name}", shown_columns(found))
    usable = [
        name for name in found if not _IDLE.fullmatch(_folded(name)) or _told([name], "label")
    ]
    if wanted.get("second") == AUTO:
        chosen |= _pair(usable, chosen.get("text"))
    for role in wanted:
        left = [name for name in usable if name not in flat(chosen.values(), found)]
        if role not in chosen and (told := _told(left, role)) is not None:
            chosen[role] = told
    missing = [role for role in wanted if role not in chosen]
    left = [name for name in usable if name not in flat(chosen.values(), found)]
    left = [name for name in left if len(wanted) > 1 or not _told([name], "label")]
    if len(missing) == len(left) == 1:
        chosen[missing.pop()] = left[0]
    if missing:
        words = _words(chosen, wanted, left, keys)
        raise _unrecognised(found, missing, place, words, _other_job(usable, wanted))
    for name in flat(chosen.values(), found):
        if list(found).count(name) > 1:
            raise BadInput(f"{place} has the column {name} twice", "rename one of them")
    return {role: chosen[role] for role in wanted}


def flat(names: Iterable[str], found: Sequence[str]) -> list[str]:
    """Columns that names stand for: one of the `found`, or `a+b` for two that mark two labels."""
    parts = ((name, [name] if name in found else name.split("+")) for name in names)
    return [one for name, several in parts for one in (several if all(several) else [name])]


def _unrecognised(
    found: Sequence[str], missing: Sequence[str], place: str, words: str, job: str | None
) -> BadInput:
    """Word the refusal of columns that are not known; `words` name them, for this job."""
    if not any(found):
        return BadInput(f"{place} has no columns", "begin with a line such as text,label")
    fix = shown_columns(found)
    if all(_is_name(name) for name in found if name):
        fix += f"; write {words}"
    fix += f", or take the job {job}" if job and "text" in missing else ""
    return BadInput(f"{place}: no column is recognised as {' or '.join(missing)}", fix)


def _other_job(usable: Sequence[str], wanted: Mapping[str, str]) -> str | None:
    """Name the job whose columns these are."""
    if "second" not in wanted and _pair(usable, None):
        return "pairs"
    return "tokens" if _told(usable, "tokens") and _told(usable, "tags") else None


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
    """Find the column whose name tells the role: all of it, or the part after its last dot.

    Else the last word of a name does, such as that of airline_sentiment, but a label's must be the
    only one.
    """
    names = list(reversed(list(columns)))
    whole = {_folded(name): name for name in names}
    there = {_folded(name.rpartition(".")[2]): name for name in names} | whole
    known = NAMES.get(role, ())
    ends = [whole[one] for word in known for one in reversed(whole) if _ends_with(one, word)]
    found = [there[name] for name in known if name in there] or ends
    return found[0] if found and (found is not ends or role == "text" or len(ends) == 1) else None


def _ends_with(name: str, word: str) -> bool:
    """Tell a name whose last word this is, unless it counts such things, as num_comments does."""
    return name.endswith(f"_{word}") and not _COUNTING.match(name)


def _folded(name: str) -> str:
    """Write a name in lower case with underscores: ReviewText and review text as review_text."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s.-]+", "_", words.lower())


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


Rows = Iterator[tuple[int, dict[str, Any]]]
STREAM = "stream.json"
"""File that stands for a split of the hub which is not stored: its name, subset and revision."""
CHILD = Path(__file__).with_name("reading_child.py")
_BATCH = 1024
_PATIENCE = 120.0
"""Seconds to wait for one batch of rows."""
_LEAST, _MOST = 2 << 30, 16 << 30
"""Bounds in bytes of the child's address space, which is half of the machine's memory."""


def read_table(path: Path, names: list[str]) -> Rows:
    """Read the rows of a Parquet file, or of a folder that datasets' save_to_disk wrote."""
    return _read(path, _source(path), names)


def table_columns(path: Path) -> list[str]:
    """Names of the columns of such a file or folder."""
    with closing(_answers(path, _source(path) | {"columns": [], "batch": _BATCH})) as answers:
        header = next(answers)
    return [*header["columns"], *header["twice"]]


def is_stream(path: Path) -> bool:
    """Tell a split that is read from the hub; only a folder of trainfit's own cache can be one."""
    own = (cache_folder() / "hub").absolute()
    return path.absolute().is_relative_to(own) and (path / STREAM).is_file()


def _source(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return {"format": "parquet", "files": [str(check_regular(path).absolute())]}
    if is_stream(path):
        return codec.read_object(path / STREAM) | {"format": "hub"}
    files = _listed(check_saved_dataset(path))
    return {"format": "arrow", "files": [str(file.absolute()) for file in files]}


def check_saved_dataset(path: Path) -> Path:
    """Return the folder; raise BadInput where it is no saved dataset of one split."""
    if (path / "dataset_dict.json").is_file():
        raise BadInput(f"{path} holds several splits", "give the folder of one, such as its train")
    if not (path / "state.json").is_file():
        fix = "give a folder that datasets' save_to_disk wrote"
        raise BadInput(f"no state.json in {path}", fix)
    return path


def _listed(path: Path) -> list[Path]:
    """List the Arrow files that state.json names, all within its folder."""
    fix = "save the dataset again"
    try:
        state = codec.read_object(path / "state.json")
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read state.json in {path} ({reason(error)})", fix) from None
    if not names or state.get("_indices_data_files"):
        raise BadInput(f"state.json in {path} does not list the rows in order", fix)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadInput(f"state.json in {path} lists a file outside of the folder", fix)
    return [check_regular(path / name, fix) for name in names]


def _read(path: Path, source: dict[str, Any], names: list[str]) -> Rows:
    number = 0
    answers = _answers(path, source | {"columns": names, "batch": _BATCH})
    with closing(answers):
        _check_columns(path, next(answers), names)
        for answer in answers:
            for values in answer["rows"]:
                number += 1
                yield number, dict(zip(names, values, strict=True))


def _answers(path: Path, request: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Read the child's answers: the columns, then batches of rows."""
    kind = "Parquet file" if request["format"] == "parquet" else "saved dataset"
    damaged: TrainfitError = BadInput(f"{path} is damaged, or not a {kind}", "save it again")
    if request["format"] == "hub":
        what = f"the hub does not send {request['name']}, split {request['split']}"
        damaged = RunFailed(what, "check the connection and try again")
    child = _start(request)
    assert child.stdout is not None
    expected = "columns"
    try:
        while True:
            answer = _answer(child, child.stdout)
            if answer is not None and "end" in answer and expected == "rows":
                return
            if answer is not None and "holds" in answer:
                what = f"{path} is damaged, or holds {answer['holds']} in a small file"
                raise BadInput(what, "write fewer or shorter texts into one file")
            if answer is None or expected not in answer:
                raise damaged
            yield answer
            expected = "rows"
    finally:
        child.kill()
        child.communicate()


def _start(request: dict[str, Any]) -> subprocess.Popen[str]:
    need("to read Parquet files and saved datasets", "pyarrow")
    # -P: beside the script lie modules with the names of libraries.
    command = [sys.executable, "-P", str(CHILD), str(_memory())]
    # The system's allocator reserves no more address space than it uses, and `datasets` would
    # import torch for its streams.
    ours = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "2", "USE_TORCH": "0"}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env={**os.environ, **ours},
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # the child died at once; the missing answer tells
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
    return child


def _memory() -> int:
    try:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        half = _LEAST
    return min(max(half, _LEAST), _MOST)


def _answer(child: subprocess.Popen[str], lines: IO[str]) -> dict[str, Any] | None:
    """Read the next line of the child; None where it died or took too long."""
    timer = threading.Timer(_PATIENCE, child.kill)
    timer.daemon = True
    timer.start()
    try:
        line = lines.readline()
    finally:
        timer.cancel()
    if not line.endswith("\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _check_columns(path: Path, header: dict[str, Any], names: list[str]) -> None:
    there: dict[str, str] = header["columns"]
    for name in names:
        if name not in there:
            raise BadInput(f"{path} has no column {name}", shown_columns(list(there)))
        if name in header["twice"]:
            raise BadInput(f"{path} has the column {name} twice", "rename one of them")
        if there[name]:
            fix = "use text, numbers, true and false, or lists of these"
            raise BadInput(f"{path}: column {name} is {there[name]}", fix)
