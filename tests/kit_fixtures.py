"""A process group of one rank, and a recorder of the reports of a training."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def group_of_one() -> Iterator[None]:
    import torch.distributed as dist  # not for tests without torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def recorder() -> Iterator[Any]:
    from sinks import recording  # not for tests without torch

    with recording() as recorder:
        yield recorder
