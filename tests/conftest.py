"""What all tests share: nothing that a test starts may outlive it."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from processes import is_helper, marked, own_children, wait_until

# nbformat loads it through jsonschema, for addresses that no notebook has: it takes three seconds
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
settings.register_profile(
    "nbddp", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("nbddp")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` and nohup leave it
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS_PROCESSES = ("multiproc", "notebook", "browser")
NOTEBOOKS_RUN = Path(__file__).parent / "notebooks" / "test_notebooks.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the ranks of most multiproc tests are started; ``spawn`` is the way of macOS."""
    parser.addoption("--start-method", choices=("forkserver", "spawn"), default="")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first: last, all but one worker would wait for it."""
    items.sort(key=lambda item: item.path != NOTEBOOKS_RUN)


@pytest.fixture(autouse=True)
def no_process_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every rank, and every child of a rank, that a test starts must be gone when it ends."""
    if not any(request.node.get_closest_marker(name) for name in STARTS_PROCESSES):
        children = own_children()
        yield
        assert own_children() <= children
        return
    before = set(psutil.pids())
    yield

    def left() -> list[psutil.Process]:
        return [process for process in marked(but=before).values() if not is_helper(process)]

    wait_until(lambda: not left(), timeout=20.0)
    remaining = {}
    for process in left():
        with suppress(psutil.NoSuchProcess):
            remaining[process.pid] = shlex.join(process.cmdline())
            process.kill()
    assert not remaining, f"left running: {remaining}"


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    """Every thread of nbddp that a test starts must have ended when it ends."""
    before = set(threading.enumerate())
    yield

    def left() -> set[str]:
        new = set(threading.enumerate()) - before
        return {thread.name for thread in new if thread.name.startswith("nbddp")}

    wait_until(lambda: not left(), timeout=20.0)
    assert not left()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that runs are recorded there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
