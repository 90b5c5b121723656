"""Shared fixtures: they check that each test ends its processes and threads."""

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from processes import is_helper, marked, own_children, wait_until
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["rank_fixtures", "kit_fixtures", "node_fixtures"]
pytest.register_assert_rewrite("lessons")
# nbformat loads it through jsonschema, for addresses that no notebook has: it takes three seconds
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
settings.register_profile(
    "gate",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("full", settings.get_profile("gate"), max_examples=300)
settings.load_profile("gate")  # .ci/full sets --hypothesis-profile=full

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` and nohup leave it
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
STARTS_PROCESSES = ("multiproc", "notebook", "browser")
MARKED_FOLDERS = ("multiproc", "ecosystem")
NOT_UNIT = {*STARTS_PROCESSES, "process", "full", "soak", "ecosystem", "gpu"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the ranks of most multiproc tests are started; ``spawn`` is the way of macOS."""
    parser.addoption("--start-method", choices=("forkserver", "spawn"), default="")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and run the slowest first, so that no worker idles at the end."""
    first = [TESTS / "notebooks" / "test_notebooks.py", TESTS / "browser"]
    items.sort(key=lambda item: not any(item.path.is_relative_to(path) for path in first))
    for item in items:
        if item.path.is_relative_to(TESTS):
            for name in set(MARKED_FOLDERS).intersection(item.path.relative_to(TESTS).parts):
                item.add_marker(name)
        for mark in item.iter_markers("gate_runs"):
            if not any(part in item.callspec.id for part in mark.args):  # type: ignore[attr-defined]
                item.add_marker("full")
        if NOT_UNIT.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("unit")


class BrowserInOneWorker(LoadFileScheduling):  # type: ignore[misc] # it has no types
    """Distribute whole files to workers, and all browser tests to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "tests/browser" if file.startswith("tests/browser/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BrowserInOneWorker | None:
    is_by_test = config.getvalue("dist") == "load"  # xdist's own scheduler distributes single tests
    return None if is_by_test else BrowserInOneWorker(config, log)


@pytest.fixture(autouse=True)
def no_process_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if not any(request.node.get_closest_marker(name) for name in STARTS_PROCESSES):
        children = own_children()
        yield
        assert own_children() <= children
        return
    before = set(psutil.pids())
    yield

    def leftovers() -> list[psutil.Process]:
        return [process for process in marked(but=before).values() if not is_helper(process)]

    # not once more: a helper that ends at this moment has no command line, and looks like a rank
    if wait_until(lambda: not leftovers(), timeout=20.0):
        return
    remaining = {}
    for process in leftovers():
        with suppress(psutil.NoSuchProcess):
            remaining[process.pid] = shlex.join(process.cmdline())
            process.kill()
    assert not remaining, f"left running: {remaining}"


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield

    def leftovers() -> set[str]:
        new = set(threading.enumerate()) - before
        return {thread.name for thread in new if thread.name.startswith("nbddp")}

    wait_until(lambda: not leftovers(), timeout=20.0)
    assert not leftovers()


@pytest.fixture(autouse=True)
def writes_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The attributes of an actor that a thread other than the session's has set: there are none."""
    writes: list[str] = []
    module: Any = sys.modules.get("nbddp.controller.actor_state")
    if module is None:
        yield writes
        return

    def set_attribute(state: Any, name: str, value: object) -> None:
        runtime = getattr(state, "_runtime", None)
        thread = getattr(runtime and runtime.event_thread, "_thread", None)
        if thread not in (None, threading.current_thread()) and thread.is_alive():
            writes.append(f"{name}, by {threading.current_thread().name}")
        object.__setattr__(state, name, value)

    monkeypatch.setattr(module.ActorState, "__setattr__", set_attribute)
    yield writes
    assert not writes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working folder, so that runs are recorded there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
