"""Which calls wait for one event, and whether a thread is still in the same one."""

import gc
import importlib
import queue
import subprocess
import sys
import threading
from bdb import Bdb
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import IPython
import pytest
import torch
from processes import wait_until

from nbddp.worker.watch import main_thread, polls
from nbddp.worker.watch.main_thread import frames_from, imported_module, mark_event_wait


@contextmanager
def running(act: Callable[[], object]) -> Iterator[Callable[[], FrameType]]:
    """Run it on a thread; the yielded function returns the frame of that thread."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield lambda: sys._current_frames()[thread.ident or 0]
    thread.join()


def test_a_blocking_call_that_wakes_up_repeatedly_keeps_its_wait_mark() -> None:
    child = subprocess.Popen(["sleep", "60"])
    with running(lambda: child.wait(timeout=60)) as frame:
        assert wait_until(lambda: mark_event_wait(frame()) is not None)
        mark = mark_event_wait(frame())
        assert not wait_until(lambda: mark_event_wait(frame()) is not mark, timeout=1.0)  # 20 wakes
        child.kill()


def test_the_outermost_import_of_a_line_is_the_imported_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "import threading\nis_over = threading.Event()\nis_over.wait()"
    for name, source in (("outer_slow", "import inner_slow"), ("inner_slow", wait)):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with running(lambda: importlib.import_module("outer_slow")) as frame:
        assert wait_until(lambda: hasattr(sys.modules.get("inner_slow"), "is_over"))
        for files, module in (
            ((__file__,), "outer_slow"),
            ((__file__, str(tmp_path / "outer_slow.py")), "inner_slow"),
            ((), ""),
        ):
            assert imported_module(frame(), files.__contains__) == module
        sys.modules["inner_slow"].is_over.set()


def test_each_blocking_call_in_a_loop_gets_a_new_wait_mark() -> None:
    is_over, never = threading.Event(), queue.Queue[int]()

    def ask() -> None:
        while not is_over.is_set():
            with suppress(queue.Empty):
                never.get(timeout=0.01)

    with running(ask) as frame:
        marks: list[object] = []

        def look() -> bool:
            mark = mark_event_wait(frame())
            if mark is not None and all(mark is not each for each in marks):
                marks.append(mark)
            return len(marks) >= 3

        assert wait_until(look)
        is_over.set()


def test_a_loop_of_waits_that_expire_keeps_its_mark_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name in polls.WAITS:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    polls.install_hooks()
    items, got = queue.Queue[int](), list[int]()

    def ask() -> None:
        with suppress(queue.Empty):
            got.append(items.get(timeout=0.01))

    def ask_repeatedly() -> None:
        while len(got) < 2:
            ask()

    with running(ask_repeatedly) as frame:
        assert wait_until(lambda: mark_event_wait(frame()) is not None)
        mark = mark_event_wait(frame())
        assert not wait_until(lambda: mark_event_wait(frame()) not in (None, mark), timeout=0.5)
        items.put(1)
        assert wait_until(lambda: mark_event_wait(frame()) not in (None, mark))
        items.put(2)


def test_marking_a_wait_does_not_replace_a_trace_function() -> None:
    is_over = threading.Event()

    def trace(*_: object) -> object:
        return trace

    def wait() -> None:
        sys.settrace(trace)
        is_over.wait(60)

    with running(wait) as frame:
        assert wait_until(lambda: frame().f_code.co_filename == threading.__file__)
        assert mark_event_wait(frame()) is None
        assert frame().f_trace is not None
        is_over.set()


def test_a_debugger_that_steps_out_stops_in_a_frame_with_a_wait_mark() -> None:
    class Steps(Bdb):
        def user_line(self, frame: FrameType) -> None:
            stops.append(frame.f_code.co_name)
            self.set_step()

        def user_return(self, _frame: FrameType, _value: object) -> None:
            self.set_step()

    stops: list[str] = []
    debugger = Steps()

    def step() -> None:
        debugger.reset()
        debugger.set_step()
        sys.settrace(debugger.trace_dispatch)
        handle()

    def handle() -> None:
        stops.append("handled")

    def wait() -> None:
        sys._getframe().f_trace = main_thread._Mark()
        step()
        stops.append("waited")

    before = sys.gettrace()
    try:
        wait()
    finally:
        sys.settrace(before)
    assert stops[:4] == ["handle", "handled", "wait", "waited"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between instructions")
def test_user_code_never_sees_the_collector_disabled_by_a_frame_reader() -> None:
    ended = threading.Event()
    before = sys.getswitchinterval()

    def read() -> None:
        while not ended.is_set():
            main_thread.main_frame()

    reader = threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        assert all(gc.isenabled() for _ in range(300_000))
        gc.disable()
        assert not any(gc.isenabled() for _ in range(300_000))
    finally:
        gc.enable()
        sys.setswitchinterval(before)
        ended.set()
        reader.join()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between instructions")
def test_no_garbage_is_collected_while_a_frame_of_another_thread_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    caller_of = main_thread._caller_of

    def read(frame: FrameType) -> FrameType | None:
        seen.append(gc.isenabled())
        return caller_of(frame)

    monkeypatch.setattr(main_thread, "_caller_of", read)
    assert [*frames_from(sys._getframe())][-1].f_back is None
    assert gc.isenabled()
    assert {*seen} == {False}
    gc.disable()
    try:
        list(frames_from(sys._getframe()))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_method_of_another_library_is_not_taken_for_a_wait_of_torch() -> None:
    store = torch.distributed.HashStore()
    box = SimpleNamespace(store=store, queue=queue.SimpleQueue())
    frame: Any = SimpleNamespace(f_locals={"store": store, "box": box}, f_globals=globals())
    names = ("store", "box.store", "box.queue", "box.missing", "missing", "queue", "torch.cuda")
    found = [each for each in names if main_thread._is_of_other_library(frame, each)]
    assert found == ["box.queue", "queue"]


@pytest.mark.parametrize(("name", "shown"), [("wrapper", "barrier"), ("copy", "copy")])
def test_only_a_logging_wrapper_of_torch_names_another_function(name: str, shown: str) -> None:
    def copy(func: object, args: object, kwargs: object) -> FrameType:
        assert (func, args, kwargs) == (torch.distributed.barrier, (), {})
        return sys._getframe()

    function = FunctionType(copy.__code__.replace(co_name=name), globals())
    assert main_thread.describe_call(function(torch.distributed.barrier, (), {})) == shown


def test_ipython_is_a_library_in_any_folder() -> None:
    assert main_thread.library_of_file(IPython.__file__) == "IPython"
    folders = [folder / name for folder, name in main_thread._LIBRARIES if name]
    assert Path(IPython.__file__).parent in folders
