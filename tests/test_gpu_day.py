"""The day's work on a GPU is ready: without one, each part says so, and none fails."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.gpu_day import Part, run, verdict_of

ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(180)
def test_without_a_gpu_each_part_says_so_and_none_fails() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    day = ["bash", str(ROOT / "tools" / "gpu_day.sh")]
    done = subprocess.run(day, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (.+) \| (.+) \| 0 s \|$", done.stdout, re.MULTILINE)
    assert [verdict for _, verdict in rows] == ["no GPU here"] * 7
    assert "pytest -m gpu" in [title for title, _ in rows]
    assert re.search(r"^\* torch \d.*Python \d", done.stdout, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (0, "....\n4 passed, 1 skipped in 3.21s\n", "4 passed, 1 skipped"),
        (1, "=== 1 failed, 2 passed in 0.50s ===\n", "FAILED: 1 failed, 2 passed"),
        (0, "steps per second: 56\n", "passed"),
        (3, "Traceback\n", "FAILED: exit status 3"),
    ],
)
def test_a_part_ends_in_words(status: int, said: str, verdict: str) -> None:
    assert verdict_of(status, said) == verdict


@pytest.mark.full
def test_what_does_not_end_is_ended_and_the_day_is_never_longer_than_it_may() -> None:
    slow = Part("Slow", ("-c", "import time; print('began', flush=True); time.sleep(60)"), 11.0)
    gone = run(slow, 1, time.monotonic())
    assert gone.verdict == "not run: the ten minutes are over"
    assert run(slow, 0, time.monotonic() + 100).verdict == "no GPU here"
    several = dataclasses.replace(slow, gpus=2)
    assert run(several, 1, time.monotonic() + 100).verdict == "needs 2 GPUs, here is 1"
    ended = run(slow, 1, time.monotonic() + 100)
    assert (ended.verdict, ended.said) == ("FAILED: not over after 11 s", "began\n")
    assert ended.has_failed
