"""One list of sources and libraries makes every cached answer stale."""

from __future__ import annotations

import pytest

from trainfit.core import caches
from trainfit.planning.estimator import estimate


def test_a_changed_source_changes_the_key_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    before = estimate.place("plans", "one question")
    monkeypatch.setattr(caches, "sources", lambda: "edited")
    assert estimate.place("plans", "one question") != before


@pytest.mark.parametrize("room", ["measuring", "tuning", "data", "runtime", "jobs", "engine"])
def test_every_room_that_decides_a_step_counts(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    from pathlib import Path

    real = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.append(str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    caches.sources.__wrapped__()
    assert any(f"/trainfit/{room}/" in path for path in read)
    assert not any(f"/trainfit/{page}/" in path for page in ("cli", "reports") for path in read)
