import re

import psutil
import pytest
import torch

from trainfit.measuring import MemoryTracker

MIB = 1024**2


@pytest.mark.skipif(torch.cuda.is_available(), reason="follows the process only without a GPU")
def test_the_process_is_followed_where_there_is_no_gpu():
    tracker = MemoryTracker()
    block = torch.ones(64 * MIB // 4)
    during = tracker.update()
    size = block.numel() * 4
    del block
    after = tracker.update()
    assert during.peak >= during.current
    assert after.peak >= during.current
    assert after.peak - after.current >= size / 2  # the block is gone, its peak is not
    tracker.reset()
    assert tracker.update().peak < during.current
    assert after.total == psutil.virtual_memory().total


def test_the_report_has_the_guides_lines(capsys: pytest.CaptureFixture[str]):
    use = MemoryTracker().report()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] in ("GPU Memory Usage:", "Process Memory Usage:")
    patterns = [
        r"  Current: \d+\.\d\d GB",
        r"  Peak: \d+\.\d\d GB",
        r"  Total: \d+\.\d\d GB",
        r"  Utilization: (\d+\.\d)%",
    ]
    for line, pattern in zip(lines[1:], patterns, strict=True):
        assert re.fullmatch(pattern, line)
    shown = float(lines[4].split()[1].rstrip("%"))
    assert shown == pytest.approx(100 * use.peak / use.total, abs=0.06)


@pytest.mark.gpu
def test_the_gpus_peak_is_the_allocators():
    tracker = MemoryTracker()
    tracker.reset()
    before = tracker.update().current
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del block  # between two updates, and not missed
    use = tracker.update()
    assert use.peak - before == 256 * MIB
    assert use.current == before
    assert use.device == "GPU"
