"""Ranks die at random moments of a training, again and again: each time the group is healed."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
from drivers.ranks import MakeRanks
from processes import wait_until

from nbddp import CellFailedError, RequestError

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(3600)]

SETUP = """
import hashlib
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
model = nbddp.prepare(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = nbddp.loader(torch.randn(4096, 64), 16)
step = 0
def digest():
    parts = [each.detach().numpy().tobytes() for each in model.parameters()]
    parts += [each["exp_avg"].numpy().tobytes() for each in optimizer.state.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""
TRAIN = """
while True:
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
"""


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_a_rank_that_dies_at_any_moment_is_replaced(make_group: MakeRanks, nproc: int) -> None:
    chance = random.Random(nproc)
    group = make_group(nproc)
    group.run(SETUP, quiet=True)
    for kill in range(int(os.environ.get("NBDDP_SOAK_KILLS", "34"))):
        before, victim = group.pids, chance.randrange(nproc)
        timer = threading.Timer(chance.uniform(0.0, 0.6), os.kill, (before[victim], signal.SIGKILL))
        timer.start()
        with pytest.raises((CellFailedError, RequestError)):  # it may die before the cell begins
            group.run(TRAIN, quiet=True)
        timer.join()
        assert wait_until(lambda: not group.is_busy)
        assert group.heal().ranks == (victim,), f"kill {kill}"
        after = group.pids
        assert [rank for rank in range(nproc) if before[rank] != after[rank]] == [victim]
        told = group.evaluate("digest(), loader.step")
        assert len({*told}) == 1, f"kill {kill} of rank {victim}: {told}"


@pytest.mark.parametrize("nproc", [16, 64])
def test_one_of_many_is_replaced(make_group: MakeRanks, nproc: int) -> None:
    group = make_group(nproc)
    group.run(SETUP, quiet=True)
    for victim in (3, 0, nproc - 1):
        group.kill(victim)
        assert group.heal().ranks == (victim,)
        told = group.evaluate("dist.barrier()\ndigest()")
        assert len({*told}) == 1
