"""Ranks are not forked from a forkserver that used CUDA; tested with a fake driver.

The fake driver has two functions of libcuda and returns the same values.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drivers.inside import imported
from drivers.ranks import Ranks

from nbddp.launch import forkserver
from nbddp.worker.cuda_probe import DRIVER, has_used_cuda

DRIVER_SOURCE = """
static int initialized = 0;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!initialized) return 3; *count = 1; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a fake libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "cuda.c", folder / DRIVER
    source.write_text(DRIVER_SOURCE)
    build = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", library, source]
    try:
        subprocess.run(build, check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    return library


def test_probe_distinguishes_a_loaded_driver_from_a_used_driver(driver: Path) -> None:
    assert not has_used_cuda("libnbddp_is_not_there.so.1")
    code = (
        f"{imported(has_used_cuda)}import ctypes; print(has_used_cuda());"
        f"driver = ctypes.CDLL({str(driver)!r}); print(has_used_cuda());"
        "driver.cuInit(0); print(has_used_cuda())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


@pytest.mark.full
def test_ranks_are_spawned_if_an_import_in_the_forkserver_used_cuda(
    folder: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "uses_cuda.py").write_text(f"import ctypes\nctypes.CDLL({str(driver)!r}).cuInit(0)")
    monkeypatch.syspath_prepend(folder)
    modules = ["uses_cuda", *forkserver.PRELOADED_MODULES]
    monkeypatch.setattr(forkserver, "PRELOADED_MODULES", modules)
    with caplog.at_level(logging.WARNING, "nbddp"), Ranks(nproc=2) as group:
        group.run(f"{imported(has_used_cuda)}import os")
        assert group.pull("has_used_cuda()") == [False, False]
        assert group.pull("os.getppid()") == [os.getpid()] * 2
        group.assert_works()
    [said] = [each.getMessage() for each in caplog.records]
    assert "CUDA" in said
