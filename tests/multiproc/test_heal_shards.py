"""A heal gives a new rank the process groups, meshes and shards of the dead one."""

from __future__ import annotations

import pytest
from drivers.ranks import MakeRanks
from sharded_models import SHARDED
from trained import kill

from nbddp import RequestError

HYBRID = f"""{SHARDED}
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel as DDP
meshes = {{"dp hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}}
wanted, optimizer = build("dp hybrid")
for number in range(4): step(wanted, optimizer, number)
net, optimizer = build("dp hybrid")
step(net, optimizer, 0)
mesh, every = meshes["dp hybrid"], dist.new_group(group_desc="every")
ddp = DDP(nn.Linear(4, 4), process_group=every)
kept = [each for each in (dist.group.WORLD, every, mesh, net, ddp)]
def use():
    x = torch.tensor([float(rank)])
    sums = [funcol.all_reduce(x, "sum", (mesh, at)).item() for at in (0, 1)]
    sums.append(funcol.all_reduce(x, "sum", mesh["shard"]).item())
    y = torch.ones(1)
    dist.all_reduce(y, group=every)
    ddp(torch.ones(2, 4)).sum().backward()
    other = dist.new_group([0, 1])
    if rank < 2: dist.all_reduce(y, group=other)
    return [*sums, y.item(), mesh.get_coordinate(), dist.get_process_group_ranks(every)]
"""


def test_a_new_rank_gets_groups_meshes_and_the_shards_of_a_replica(make_group: MakeRanks) -> None:
    group = make_group(4)
    group.run(HYBRID + "before = use()", quiet=True)
    for number, dead in enumerate([1, 0], start=1):
        group.run("numbers = [*map(id, kept)]", quiet=True)
        kill(group, dead)
        healed = group.heal()
        assert (healed.ranks, healed.left) == ((dead,), {})
        survivors = [rank for rank in range(4) if rank != dead]
        names = "[dist.group.WORLD, every, mesh, net, ddp]"
        assert all(group.evaluate(f"[*map(id, {names})] == numbers", ranks=survivors))
        group.run("assert use() == before, (use(), before)")
        assert group.evaluate("every.group_desc") == ["every"] * 4
        group.run(f"step(net, optimizer, {number})")
    group.run("step(net, optimizer, 3)\nassert all(map(torch.equal, whole(net), whole(wanted)))")
    kill(group, 2, 0)  # the last ranks with their shards
    with pytest.raises(RequestError, match=r"\(FSDP\) died with its rank: run .*restart"):
        group.heal()
