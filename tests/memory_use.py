"""Measure the memory that objects keep."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeps_less_than(size: int) -> Iterator[None]:
    """Check that the objects created in the block keep fewer bytes."""
    tracemalloc.start()
    try:
        yield
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < size
