import os
import socket
from pathlib import Path

import pytest

from trainfit.core.errors import BadInput
from trainfit.core.files import (
    cache_folder,
    check_regular,
    open_regular,
    open_to_append,
    read_text,
    write_whole,
)


def test_a_failed_write_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "file"
    write_whole(path, "old")

    def fail(_handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_text_are_written_as_given(tmp_path: Path):
    write_whole(tmp_path / "a" / "b", b"\x00\xff")
    write_whole(tmp_path / "c", "é")
    assert (tmp_path / "a" / "b").read_bytes() == b"\x00\xff"
    assert (tmp_path / "c").read_bytes() == "é".encode()


def test_nothing_waits_for_the_reader_of_a_pipe(tmp_path: Path):
    os.mkfifo(tmp_path / "timeline.jsonl")
    with pytest.raises(OSError, match="it is a pipe"):
        open_to_append(tmp_path / "timeline.jsonl")
    for line in ("one\n", "two\n"):
        with open_to_append(tmp_path / "new") as file:
            file.write(line)
    assert (tmp_path / "new").read_text() == "one\ntwo\n"


def test_nothing_is_written_through_a_link(tmp_path: Path):
    """As in a run folder from elsewhere: train.log → ~/.bashrc."""
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "train.log").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic link"):
        open_to_append(tmp_path / "train.log")
    write_whole(tmp_path / "train.log", "new")
    assert (tmp_path / "mine").read_text() == "kept"


def test_half_a_character_is_a_question_mark(tmp_path: Path):
    write_whole(tmp_path / "page", "a run in \udcff, or \ud800 in its file")
    assert (tmp_path / "page").read_text() == "a run in ?, or ? in its file"


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TRAINFIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trainfit"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


_ODD = {
    "a pipe": _fifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a file of /proc": lambda path: path.symlink_to("/proc/self/maps"),
    "levels of symbolic links": lambda path: path.symlink_to(path.name),
    "no file": lambda path: path.symlink_to(path.name + "-of-nowhere"),
}


@pytest.mark.parametrize("kind", list(_ODD))
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("given")
    _ODD[kind](path)
    with pytest.raises(OSError, match="given"):
        open_regular(path)
    with pytest.raises(BadInput, match=kind) as caught:
        check_regular(path)
    assert "\n" not in str(caught.value)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path):
    (tmp_path / "there").write_text("é", encoding="utf-8")
    (tmp_path / "link").symlink_to("there")
    assert read_text(check_regular(tmp_path / "link")) == "é"
    with pytest.raises(OSError, match="MiB"):
        read_text(tmp_path / "link", most=1)
    with pytest.raises(BadInput, match="null"):
        check_regular(tmp_path / "a\0b")
