"""How much memory something keeps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeps_less_than(size: int) -> Iterator[None]:
    """Check that what is made within it, and stays, takes fewer bytes."""
    tracemalloc.start()
    try:
        yield
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < size
