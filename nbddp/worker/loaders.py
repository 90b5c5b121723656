"""A ``DataLoader`` that keeps its workers works again when it was interrupted as an epoch began.

It asks each worker to begin anew and counts their answers. Where an interrupt ends that, the
answers that are left are taken for those of the next epoch, or for batches of it: that one fails
with a ``KeyError``, or waits for ever, or gets wrong batches (seen with torch 2.13).
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import dataloader


def let_loaders_begin_anew() -> None:
    """From here on a loader that could not begin an epoch has new workers for the next one."""
    kind: Any = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    original = getattr(kind, "_reset", None)
    if original is None:
        return

    @functools.wraps(original)
    def reset(self: Any, loader: Any, *args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        try:
            original(self, loader, *args, **options)
        except BaseException:
            if getattr(loader, "_iterator", None) is self:
                loader._iterator = None
            raise

    kind._reset = reset
