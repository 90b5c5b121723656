"""Loaders in one process that plays each rank in turn."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from nbddp.extensions.train.loader import Loader
from nbddp.reporting import this_rank

SIZES = {
    "samples": st.integers(1, 40),
    "world_size": st.integers(1, 5),
    "batch_size": st.integers(1, 7),
}


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_rank, "rank", lambda: rank)
        patch.setattr(this_rank, "world_size", lambda: world_size)
        yield


def on_ranks(world_size: int, make: Callable[[], Any], epochs: int = 1) -> list[list[Any]]:
    found = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            batches = make()
            found.append([batch.tolist() for _ in range(epochs) for batch in batches])
    return found


def resumed(make: Callable[[], Loader], state: dict[str, Any] | None) -> Loader:
    made = make()
    assert state is not None
    made.load_state_dict(state)
    return made


def samples_of(batches: Iterable[Any]) -> list[int]:
    return [int(index) for batch in batches for index in torch.as_tensor(batch).reshape(-1)]
