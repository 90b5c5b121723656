"""Seeded mistakes are found in what real ranks say, and cells that are right are left alone."""

from __future__ import annotations

import pytest
from drivers.ranks import Ranks
from seeded import MORE, SEEDS, SETUP, Seed

from nbddp.checks.facts import RankFacts
from nbddp.checks.registry import Finding
from nbddp.group.checking import check_cell
from nbddp.record.cell import CellRequest
from nbddp.wire.messages import CellEnded

pytestmark = pytest.mark.multiproc

ONE_THREAD = "torch.set_num_threads(1)\n"  # a mistake of another test may have set more
ALONE = "\nalone = DataLoader(data, batch_size=16, shuffle=True)\n"
RIGHT = """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(epoch, loss.item())
model.eval()
right = torch.zeros(1)
with torch.no_grad():
    for x, y in test:
        right += (model.module(x).argmax(1) == y).sum()
dist.all_reduce(right)
if rank == 0:
    torch.save(model.module.state_dict(), "right.pt")
dist.barrier()
"""


def found_in(group: Ranks, cell: str, *, runs: bool = True) -> list[Finding]:
    """What is said under the cell; of one that cannot run, with what the ranks had before."""
    result = group.run(cell if runs else f"pass  # {' '.join(cell.split())}", quiet=True)
    reports: dict[int, CellEnded] = result.reports
    return check_cell(
        CellRequest(source=cell),
        {rank: RankFacts.read(each.facts) for rank, each in reports.items()},
        world_size=2,
        is_ok=True,
        is_asked=False,
    )


@pytest.mark.parametrize("seed", [*SEEDS, *MORE], ids=lambda each: each.name)
def test_a_seeded_mistake_is_found(shared_group: Ranks, seed: Seed) -> None:
    shared_group.run(ONE_THREAD + SETUP + ALONE, quiet=True)
    found = {each.rule for each in found_in(shared_group, seed.cell, runs=seed.runs)}
    assert found == ({seed.rule} if seed.rule else set())


MODELS = """
from torch.distributed.fsdp import fully_shard
norm = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
still = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), broadcast_buffers=False)
parts = fully_shard(nn.Linear(4, 8))
whole = nn.Linear(4, 8)
"""


def test_a_forward_on_one_rank_is_found_where_the_ranks_say_that_it_meets(
    shared_group: Ranks,
) -> None:
    shared_group.run(SETUP + MODELS, quiet=True)
    meets = {"norm": True, "still": False, "model": False, "parts": True, "whole": False}
    for name, is_found in meets.items():
        cell = f"if rank == 0:\n    with torch.no_grad():\n        {name}(x)"
        found = [each.rule for each in found_in(shared_group, cell, runs=False)]
        assert found == (["ND102"] if is_found else []), name


def test_a_cell_that_is_right_is_left_alone(shared_group: Ranks) -> None:
    assert found_in(shared_group, SETUP) == []
    assert found_in(shared_group, RIGHT) == []
