"""What the forkserver imports when there is time: what DDP's first model would in every rank.

It serves between two parts, so that a start waits for one of them at most. None of it touches CUDA
while it is imported.
"""

from __future__ import annotations

import gc
import importlib
import signal

PARTS = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
GROW_SIGNAL = signal.SIGUSR1


def listen() -> None:
    """Import one part at every signal; called in the forkserver's main thread."""
    left = list(PARTS)

    def import_next(*_signal: object) -> None:
        if left:
            importlib.import_module(left.pop(0))
            share()

    signal.signal(GROW_SIGNAL, import_next)


def stop_listening() -> None:
    """In a rank the signal means what it means anywhere."""
    signal.signal(GROW_SIGNAL, signal.SIG_DFL)


def share() -> None:
    """Keep what is there now shared with all ranks: their collectors leave it alone."""
    gc.collect()
    gc.freeze()
