"""What a Binder gives: the quickstart opens, and four ranks fit into its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from notebook import Notebook
from processes import wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.multiproc, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
QUICKSTART = "notebooks/00_quickstart.ipynb"
CONFIG = ROOT / "binder" / "jupyter_lab_config.json"


def memory_of(pid: int) -> int:
    """Bytes that a process and all that come from it hold; what they share counts once (PSS)."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended, or is about to
            continue
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's own measure")
def test_the_quickstart_with_four_ranks_stays_under_a_gigabyte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEM_LIMIT", str(2 << 30))  # as Binder sets it
    cells = nbformat.read(ROOT / QUICKSTART, as_version=4).cells
    held = []
    with Notebook(folder, loads=False) as notebook:
        for cell in cells:
            if cell.cell_type == "code":
                notebook.run(cell.source.replace("--nproc 2", "--nproc 4"))
                held.append(memory_of(notebook.pid))
            if "accuracy = " in cell.source:
                assert notebook.run("%ddp pull accuracy").result.count("0.9") == 4
                shared = notebook.run("%%ddp\nimport sys\n'torch._dynamo' in sys.modules")
                assert shared.text == "Out [ranks 0-3] True\n"
    assert 200 << 20 < max(held) < 10**9, f"kernel and ranks took {max(held) / 1e6:.0f} MB"


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab with Binder's configuration, at the top of the clone."""
    configs, runtime = folder / "config", folder / "runtime"
    configs.mkdir()
    (configs / CONFIG.name).write_bytes(CONFIG.read_bytes())
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ip=127.0.0.1", "--port=0", "--IdentityProvider.token="),
            f"--ServerApp.root_dir={ROOT}",
        ],
        env=os.environ | {"JUPYTER_CONFIG_PATH": str(configs), "JUPYTER_RUNTIME_DIR": str(runtime)},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: bool(_address(runtime)), timeout=60)
        yield _address(runtime)
    finally:
        process.terminate()
        process.wait(20)


def _address(runtime: Path) -> str:
    for path in runtime.glob("jpserver-*.json"):
        try:
            return str(json.loads(path.read_text())["url"])
        except ValueError:  # half written
            continue
    return ""


def test_a_binder_opens_the_quickstart(server: str) -> None:
    with urllib.request.urlopen(server, timeout=30) as page:
        assert page.url.removeprefix(server) == f"lab/tree/{QUICKSTART}"
    assert (ROOT / QUICKSTART).is_file()
    assert CONFIG.name in (ROOT / "binder" / "postBuild").read_text()
