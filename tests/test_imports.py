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


def test_a_stop_ends_the_wait_and_not_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, slow = tmp_path / "go_on", "slow_to_import"
    (tmp_path / f"{slow}.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nvalue = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, slow, raising=False)
    main = threading.main_thread().ident or 0

    def stop() -> None:
        wait_until(lambda: slow in sys.modules)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        import_aside(slow)
    threading.Timer(0.1, go_on.touch).start()
    import_aside(slow)  # goes on with the same import, and waits for it
    assert sys.modules[slow].value == 7
    assert importlib.import_module(slow).value == 7
    (tmp_path / "broken_module.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_aside("broken_module")
