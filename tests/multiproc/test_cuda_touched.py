"""A helper in which CUDA was touched forks no rank: a new one does; tried with a driver of our own.

The stand-in has the two functions of libcuda that matter, and says what the real one says.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from drivers.inside import imported
from drivers.ranks import Ranks

from nbddp.launch import forkserver
from nbddp.worker.untouched import DRIVER, is_touched

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]  # each starts helpers anew

DRIVER_SOURCE = """
static int initialized = 0;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!initialized) return 3; *count = 1; return 0; }
"""
TOUCHES = """
import ctypes, os, pathlib
driver = ctypes.CDLL({driver!r})
seen = pathlib.Path({seen!r})
if {always} or not seen.exists():
    seen.touch()
    if {late}:
        os.register_at_fork(after_in_parent=lambda: driver.cuInit(0))
    else:
        driver.cuInit(0)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda.so.1 that this machine has not."""
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "cuda.c", folder / DRIVER
    source.write_text(DRIVER_SOURCE)
    build = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", library, source]
    try:
        subprocess.run(build, check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    return library


def preload(
    folder: Path,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    always: bool = False,
    late: bool = False,
) -> None:
    """Have each helper, or the first, touch CUDA before all else."""
    code = TOUCHES.format(driver=str(driver), seen=str(folder / "seen"), always=always, late=late)
    (folder / "touches_cuda.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(forkserver, "PRELOAD", ["touches_cuda", *forkserver.PRELOAD])


def test_the_probe_tells_a_driver_that_was_only_loaded_from_one_that_was_used(driver: Path) -> None:
    assert not is_touched("libnbddp_is_not_there.so.1")
    code = (
        f"{imported(is_touched)}import ctypes; print(is_touched());"
        f"driver = ctypes.CDLL({str(driver)!r}); print(is_touched());"
        "driver.cuInit(0); print(is_touched())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


@pytest.mark.full
def test_ranks_are_forked_from_a_new_helper_and_the_user_is_told_who_it_was(
    folder: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preload(folder, driver, monkeypatch)
    with caplog.at_level(logging.WARNING, "nbddp"), Ranks(nproc=2) as group:
        group.run(f"{imported(is_touched)}import os")
        assert group.pull("is_touched()") == [False, False]
        group.restart()
        [helper] = {*group.pull("__import__('os').getppid()")}
        assert helper != os.getpid()  # they were not spawned
    [told] = [each.getMessage() for each in caplog.records]
    assert re.search("forked.*CUDA.*Python, torch or IPython", told)


@pytest.mark.full
def test_where_every_helper_is_touched_ranks_are_spawned(
    folder: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preload(folder, driver, monkeypatch, always=True)
    with caplog.at_level(logging.WARNING, "nbddp"), Ranks(nproc=1) as group:
        group.assert_works()
    forked, spawned = [each.getMessage() for each in caplog.records]
    assert "forked" in forked
    assert "spawned" in spawned


@pytest.mark.full
def test_a_rank_of_the_helper_that_was_touched_after_it_was_forked_lives_on(
    folder: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preload(folder, driver, monkeypatch, late=True)
    with caplog.at_level(logging.WARNING, "nbddp"), Ranks(nproc=2) as group:
        helpers = group.pull("__import__('os').getppid()")
        assert len(set(helpers)) == 2
        group.assert_works()
    assert re.search("CUDA.*thread", caplog.text)
    assert not [pid for pid in helpers if psutil.pid_exists(pid)]
