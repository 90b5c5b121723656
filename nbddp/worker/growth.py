"""What the forkserver does when there is time: import what DDP's first model would in every rank.

It serves between two parts, so that a start waits for one of them at most. None of it touches CUDA
while it is imported.
"""

from __future__ import annotations

import gc
import importlib
import signal
from collections.abc import Callable

MODULES = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
PARTS = 1 + len(MODULES)
GROW_SIGNAL = signal.SIGUSR1


def listen(first: Callable[[], None]) -> None:
    """Do one part at every signal, ``first`` first; called in the forkserver's main thread."""
    modules = list(MODULES)
    has_begun = False

    def do_next(*_signal: object) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            first()
        elif modules:
            importlib.import_module(modules.pop(0))
        gc.collect()
        gc.freeze()  # what ranks share stays shared: their collectors leave it alone

    gc.freeze()
    signal.signal(GROW_SIGNAL, do_next)


def stop_listening() -> None:
    """In a rank the signal means what it means anywhere."""
    signal.signal(GROW_SIGNAL, signal.SIG_DFL)
