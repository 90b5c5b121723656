"""A process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def group_of_one() -> Iterator[None]:
    import torch.distributed as dist  # not for tests without torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
