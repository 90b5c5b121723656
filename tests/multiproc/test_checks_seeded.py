"""Seeded mistakes are found in what real ranks say, and cells that are right are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drivers.ranks import Ranks
from seeded import MORE, SEEDS, SETUP, Seed

from nbddp.checks.facts import RankFacts
from nbddp.checks.rule import Finding
from nbddp.group.checking import check_cell
from nbddp.record.cell import CellRequest
from nbddp.wire.messages import CellEnded

pytestmark = pytest.mark.multiproc

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


@pytest.fixture
def group(make_group: Callable[..., Ranks]) -> Ranks:
    return make_group(nproc=2)


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
def test_a_seeded_mistake_is_found(group: Ranks, seed: Seed) -> None:
    group.run(SETUP + ALONE, quiet=True)
    found = {each.rule for each in found_in(group, seed.cell, runs=seed.runs)}
    assert found == ({seed.rule} if seed.rule else set())


MODELS = """
from torch.distributed.fsdp import fully_shard
norm = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
still = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), broadcast_buffers=False)
parts = fully_shard(nn.Linear(4, 8))
whole = nn.Linear(4, 8)
"""


@pytest.mark.parametrize(
    ("name", "is_found"),
    [("norm", True), ("still", False), ("model", False), ("parts", True), ("whole", False)],
)
def test_a_test_on_one_rank_is_found_where_forward_meets(
    group: Ranks, name: str, *, is_found: bool
) -> None:
    """The rule knows of models of other cells what the ranks say of them."""
    group.run(SETUP + MODELS, quiet=True)
    cell = f"if rank == 0:\n    with torch.no_grad():\n        {name}(x)"
    found = found_in(group, cell, runs=False)
    assert [each.rule for each in found] == (["ND102"] if is_found else [])


def test_of_25_seeded_mistakes_at_least_22_have_a_rule() -> None:
    assert len(SEEDS) == 25
    assert sum(bool(each.rule) for each in SEEDS) >= 22


def test_a_cell_that_is_right_is_left_alone(group: Ranks) -> None:
    assert found_in(group, SETUP) == []
    assert found_in(group, RIGHT) == []
