"""The one place where torch is asked to say that it makes a process group, a cell's included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist


def watch_new_groups(
    *making: Callable[[], AbstractContextManager[None]],
    asked: Callable[[Sequence[int]], None] = lambda _ranks: None,
    made: Callable[[dist.ProcessGroup], None],
) -> None:
    """Be told of all groups that this process makes from here on.

    Args:
        making: what is entered while a group connects to its ranks.
        asked: takes the ranks that a group is to have, this one or not; none are all of them.
        made: takes it when it is there.
    """
    module: Any = dist.distributed_c10d
    name = "_new_process_group_helper"
    make: Callable[..., Any] | None = getattr(module, name, None)
    if make is None:
        return  # a torch that makes them elsewhere: then nobody is told

    @functools.wraps(make)
    def make_watched(size: int, rank: int, ranks: Sequence[int], *args: Any, **options: Any) -> Any:
        asked(ranks)
        with ExitStack() as stack:
            for enter in making:
                stack.enter_context(enter())
            result = make(size, rank, ranks, *args, **options)
        if isinstance(result[0], dist.ProcessGroup):  # else this rank is not of the group
            made(result[0])
        return result

    setattr(module, name, make_watched)
