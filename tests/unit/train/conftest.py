"""A recorder of reports, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from sinks import Recorder, recording


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as recorder:
        yield recorder


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
