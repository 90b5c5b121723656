"""Which errors are the communication backend's own: its connections are closed by them."""

from __future__ import annotations

import re

import torch.distributed as dist

_WORDS = re.compile(
    r"gloo|nccl|timed out waiting|pair closure|closed by peer|connection was likely closed",
    re.IGNORECASE,
)


def is_backends(error: BaseException | None) -> bool:
    """Whether Gloo or NCCL raised this very error."""
    is_told = isinstance(error, RuntimeError) and _WORDS.search(str(error))
    return isinstance(error, dist.DistBackendError) or bool(is_told)


def comes_from_backend(error: BaseException | None) -> bool:
    """Whether Gloo or NCCL raised an error, or one that it came from."""
    seen: set[int] = set()  # a cell may have made a circle of them
    while error is not None and id(error) not in seen:
        if is_backends(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
