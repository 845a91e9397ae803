import os
from pathlib import Path

import pytest

from trainfit.files import cache_folder, write_whole


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


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TRAINFIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trainfit"
