"""A heal gives a new rank the process groups, meshes and shards of the dead one."""

import re

import pytest
from drivers.ranks import MakeRanks
from sharded_models import MESHES, SHARDED
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
steps, gradients = [], []
optimizer.register_step_post_hook(lambda *_: steps.append(1))
next(net.parameters()).register_post_accumulate_grad_hook(lambda _: gradients.append(1))
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


def test_a_new_rank_gets_groups_meshes_and_the_shards_of_a_replica(
    make_group: MakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(4)
    group.run(HYBRID + "before = use()", quiet=True)
    # at last, all ranks of a group of the mesh
    for number, dead in enumerate([(1,), (0,), (2, 3)], start=1):
        group.run("numbers = [*map(id, kept)]", quiet=True)
        kill(group, *dead)
        survivors = [rank for rank in range(4) if rank not in dead]
        healed = group.heal(donor=survivors[0])
        assert (healed.ranks, healed.left) == (dead, {})
        names = "[dist.group.WORLD, every, mesh, net, ddp]"
        assert all(group.evaluate(f"[*map(id, {names})] == numbers", ranks=survivors))
        group.run("assert use() == before, (use(), before)")
        assert group.evaluate("every.group_desc") == ["every"] * 4
        group.run(f"step(net, optimizer, {number})", shard_copies=100)
        assert (
            "copies of shards: every 100 steps" in capsys.readouterr().out
        )  # at once after a heal
    trained = "assert all(map(torch.equal, whole(net), whole(wanted)))"
    group.run(trained)
    assert group.evaluate("len(steps), len(gradients)") == [(3, 3)] * 4
    group.wait_for_copies()
    kill(group, 2, 0)  # all that had their shards
    group.heal(donor=1)
    group.run(f"assert use() == before\n{trained}")
    assert "the models are back at step 4 of 4" in capsys.readouterr().out


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_tensor_parallel_model_is_healed_from_copies(make_group: MakeRanks, size: int) -> None:
    kind = {2: "tp", 4: "dp tp"}[size]
    group = make_group(size)
    group.run(
        f"{SHARDED}meshes = {{{kind!r}: init_device_mesh('cpu', {MESHES[size][kind]})}}\n"
        "def train(first, last):\n"
        "    for number in range(first, last):\n"
        "        torch.manual_seed(number)  # all ranks have the same inputs\n"
        "        optimizer.zero_grad()\n"
        "        net(torch.randn(4, 8)).square().mean().backward()\n"
        "        optimizer.step()\n"
        f"net, optimizer = build({kind!r})\ntrain(0, 4)\n"
        f"wanted = whole(net)\nnet, optimizer = build({kind!r})"
    )
    group.run("train(0, 3)", shard_copies=2)
    group.wait_for_copies()
    kill(group, 1)
    group.heal()
    group.run(
        "train(2, 4)\nassert all(map(torch.equal, whole(net), wanted))\n"
        f"net, optimizer = build({kind!r})"
    )
    kill(group, 0)
    refusal = (
        r"a part of net, optimizer \(.* died with rank 0, and there is no copy .* a checkpoint"
    )
    with pytest.raises(RequestError, match=refusal):
        group.heal()


TWO_OPTIMIZERS = """
from torch.distributed.fsdp import fully_shard
net = torch.nn.Linear(8, 8)
fully_shard(net)
first, second = torch.optim.AdamW([net.weight]), torch.optim.AdamW([net.bias])
"""
STEPS = """
for _ in range(5):
    net(torch.randn(4, 8)).square().mean().backward()
    first.step()
    second.step()
    net.zero_grad()
"""


def test_a_copy_has_a_step_of_all_optimizers(make_group: MakeRanks) -> None:
    group = make_group(2)
    group.run(TWO_OPTIMIZERS)
    group.run(STEPS, shard_copies=4)
    group.wait_for_copies()
    kill(group, 1)
    group.heal()
    made = "[int(each.state_dict()['state'][0]['step']) for each in (first, second)]"
    assert group.evaluate(made) == [[4, 4]] * 2


COPIES = f"""{SHARDED}
from itertools import islice
meshes = {{"dp": init_device_mesh("cpu", (3,))}}
samples = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
def make():
    torch.manual_seed(5 + rank)
    net, optimizer = build("dp")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(5 + rank)
    return net, optimizer, schedule, nbddp.loader(samples, 4, seed=2)
def train(stop):
    for batch in islice(loader, stop - loader.step):
        optimizer.zero_grad()
        net(nn.functional.dropout(batch)).square().mean().backward()
        optimizer.step()
        schedule.step()
net, optimizer, schedule, loader = make()
train(12)
wanted = whole(net)
net, optimizer, schedule, loader = make()
saved = nbddp.Checkpoint("saved")
saved.save(1, value=1)
"""


def test_a_heal_goes_back_to_the_copies_of_shards(
    make_group: MakeRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(3)
    group.run(COPIES, quiet=True)
    # one copy: ranks leave out a copy while they exchange another
    group.run("train(5)", shard_copies=4)
    group.wait_for_copies()
    output = capsys.readouterr().out
    assert re.search(r"every 4 steps, each rank copies its shards .* [\d.]+ KiB, and needs", output)
    names = "net, optimizer, schedule, loader"
    for dead in (1, 2):  # the second time, rank 0 has the copy that it got in the first heal
        group.run(f"kept = {names}\ndel {names}")  # the copies know them by other paths
        kill(group, dead)
        group.heal()
        group.run(f"{names} = kept\ndel kept")
        group.run("assert (loader.step, schedule.last_epoch) == (4, 4)")
        assert "the models are back at step 4 of" in capsys.readouterr().out
    group.run("train(12)", shard_copies=100)
    group.run("assert all(map(torch.equal, whole(net), wanted))")
    failure = group.failure_of("import os\nif rank < 2: os._exit(3)", heal=1)
    assert "lost all variables" in failure.report
    assert "group.heal()" not in failure.report
    refusal = r"rank 1, which had the copy of rank 0, died too: .*; the last one is .*saved"
    assert re.search(f"not started again: .*{refusal}", capsys.readouterr().out)
    with pytest.raises(RequestError, match=refusal):
        group.heal()
