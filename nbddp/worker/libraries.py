"""What libraries remember of a script that ran, and what of it the next one must not find."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_ACCELERATES = ("PartialState", "AcceleratorState", "GradientState")


@contextmanager
def accelerate_apart(*, keeps: bool) -> Iterator[None]:
    """Accelerate asks once in a process's life how it was started, and whether there is a group.

    Args:
        keeps: whether the script's names stay, an accelerator among them maybe: the first one's
            answers do, too.
    """
    before = [(each, dict(each)) for each in _accelerate_states()]
    for state, _ in before:
        state.clear()
    try:
        yield
    finally:
        if not keeps or any(content for _, content in before):
            for state in _accelerate_states():
                state.clear()
        for state, content in before:
            state.update(content)


def _accelerate_states() -> list[MutableMapping[str, Any]]:
    """What all objects of a class share there."""
    module: Any = sys.modules.get("accelerate.state")
    classes: list[Any] = [getattr(module, name, None) for name in _ACCELERATES]
    return [each._shared_state for each in classes if hasattr(each, "_shared_state")]


@contextmanager
def compiler_apart() -> Iterator[None]:
    """torch.compile() counts, by function, what it has compiled, and gives up after eight times.

    torch's own functions outlive a script. Where one has compiled something, all is forgotten that
    is not in a file: what cells have compiled is compiled again when they call it.
    """
    before = {name: Counter(counts) for name, counts in _compilers_counters().items()}
    _compilers_counters().clear()
    try:
        yield
    finally:
        counters = _compilers_counters()
        if any(counters.values()):
            sys.modules["torch._dynamo"].reset()
        counters.clear()
        counters.update(before)


def _compilers_counters() -> MutableMapping[str, Counter[str]]:
    """What it has done so far; empty as long as it is not loaded."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters: MutableMapping[str, Counter[str]] = getattr(module, "counters", {})
    return counters
