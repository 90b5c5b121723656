"""Ranks that die at random moments of a training: after each heal the models have the right values.

Before some deaths the user interrupts a training, and makes the model again under the same name.

``NBDDP_SOAK_KILLS`` is the number of kills of each model, ``NBDDP_SOAK_SEED`` the seed.
"""

import os
import random
import time

import pytest
from drivers.ranks import Capture, MakeRanks
from sharded_models import SHARDED

from nbddp import CellFailedError

KILLS = int(os.environ.get("NBDDP_SOAK_KILLS", "3"))
SEED = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
KINDS = {  # ranks, a mesh, steps between copies
    "ddp": (2, "(2,)", 0),
    "dp hybrid": (4, "(2, 2), mesh_dim_names=('replicate', 'shard')", 3),
    "dp": (3, "(3,)", 3),
}
TRAINING = """
import os, signal, threading
from torch.nn.parallel import DistributedDataParallel as DDP
build_sharded = build
def build(kind):
    if kind != "ddp": return build_sharded(kind)
    torch.manual_seed(7)
    net = DDP(nn.Sequential(Block(), Block(), nn.Linear(8, 4)))
    return net, torch.optim.AdamW(net.parameters(), 1e-2)
def flat(): return torch.cat([each.reshape(-1) for each in whole(net)])
def count_steps():
    states = [*optimizer.state.values()]
    return int(states[0]["step"]) if states else 0
net, optimizer = build(kind)
expected = [flat()]  # after each step, without a death
for number in range(150):
    step(net, optimizer, number)
    expected.append(flat())
net, optimizer = build(kind)
def steps(count):
    first = count_steps()
    for number in range(first, min(first + count, 150)): step(net, optimizer, number)
def train(dying, seconds):
    if rank == dying:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    steps(150)
    time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("kind", KINDS)
def test_models_are_right_after_random_kills(
    make_group: MakeRanks, capsys: Capture, kind: str
) -> None:
    draw = random.Random(f"{SEED} {kind}")
    size, mesh, copies = KINDS[kind]
    group = make_group(size)
    meshes = f"meshes = {{{kind!r}: init_device_mesh('cpu', {mesh})}}\nkind = {kind!r}\n"
    group.run(f"{SHARDED}{meshes}{TRAINING}", quiet=True)
    steps = []
    for _ in range(KILLS):
        dying = draw.randrange(size)
        for _ in range(draw.randrange(3)):  # an interrupt may leave the ranks at different steps
            handle = group.begin("train(None, 0)", shard_copies=copies)
            time.sleep(draw.uniform(0.1, 1.0))
            group.interrupt()
            group.finish(handle)
            group.run("net, optimizer = build(kind)", quiet=True)
        group.run("steps(6)", shard_copies=copies, quiet=True)  # there is a copy of them
        with pytest.raises(CellFailedError, match=f"rank {dying} was killed by SIGKILL"):
            group.run(f"train({dying}, {draw.uniform(0.1, 1.0)})", shard_copies=copies)
        healed = group.heal()
        assert (healed.ranks, healed.left) == ((dying,), {})
        capsys.readouterr()
        found = group.evaluate("count_steps(), torch.equal(flat(), expected[count_steps()])")
        assert found == [(found[0][0], True)] * size, (found, capsys.readouterr().out)
        steps.append(found[0][0])
        group.run("if count_steps() > 100: net, optimizer = build(kind)", quiet=True)
    assert len(steps) == KILLS, steps
