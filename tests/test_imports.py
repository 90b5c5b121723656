"""An import that is waited for can be interrupted, and is whole all the same."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_until

from nbddp.imports import import_aside


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that takes half a second to import."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nvalue = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_to_import", raising=False)
    return "slow_to_import"


def test_a_stop_ends_the_wait_and_not_the_import(slow: str, tmp_path: Path) -> None:
    main, go_on = threading.main_thread().ident or 0, tmp_path / "go_on"
    (tmp_path / f"{slow}.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nvalue = 7\n"
    )

    def stop() -> None:
        wait_until(lambda: slow in sys.modules)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        import_aside(slow)
    go_on.touch()
    assert wait_until(lambda: hasattr(sys.modules.get(slow), "value"))
    import_aside(slow)
    assert importlib.import_module(slow).value == 7


def test_it_is_there_afterwards_and_what_it_raises_is_raised(slow: str, tmp_path: Path) -> None:
    began = time.monotonic()
    import_aside(slow)
    assert time.monotonic() - began >= 0.4
    assert sys.modules[slow].value == 7
    (tmp_path / "broken_module.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_aside("broken_module")
