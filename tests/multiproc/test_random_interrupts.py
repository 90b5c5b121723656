"""Interrupts at random moments of a training: the next step works, and its values are right.

``NBDDP_SOAK_INTERRUPTS`` is the number of interrupts of each model, ``NBDDP_SOAK_SEED`` the seed.
"""

import os
import random
import re
import time
from pathlib import Path

import pytest
from drivers.inside import imported
from drivers.ranks import Capture, MakeRanks, Ranks
from processes import wait_until
from sharded_models import MESHES, SHARDED

from nbddp.worker.cell import last_step

INTERRUPTS = int(os.environ.get("NBDDP_SOAK_INTERRUPTS", "8"))
SEED = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
RANKS = {"ddp": 2, "dp": 2, "tp": 2, "pipeline": 2, "p2p": 2, "all_to_all": 2}
RANKS |= {"dp hybrid": 4, "dp tp": 4}
# Rank 1 sleeps at a random line of a training: the others wait in a collective, which is aborted.
TRAINING = """
import signal
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        sent = self.shared(x).contiguous()
        mine = all_to_all_single(torch.empty_like(sent), sent)
        return all_to_all_single(torch.empty_like(sent), self.expert(mine).contiguous())
build_sharded, step_sharded = build, step
def build(kind):
    torch.manual_seed(7)
    if kind == "ddp": net = DDP(nn.Sequential(Block(), Block(), nn.Linear(8, 4)))
    elif kind == "all_to_all": net = Experts()
    elif kind == "p2p": net = nn.Linear(8, 8)  # a stage of a pipeline that is written by hand
    elif kind == "pipeline":
        net = nn.Linear(8, 8)
        stage = PipelineStage(net, rank, world_size, torch.device("cpu"))
        loss = lambda a, b: (a - b).square().mean()
        net.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    else: return build_sharded(kind)
    return net, torch.optim.AdamW(net.parameters(), 1e-2)
def step(net, optimizer, number):
    if kind not in ("pipeline", "p2p", "all_to_all"):
        return step_sharded(net, optimizer, number)
    torch.manual_seed(100 * number + rank)
    optimizer.zero_grad()
    if kind == "pipeline":
        batch = torch.randn(8, 8)
        net.schedule.step(*[batch] * (rank == 0), **{"target": batch} if rank else {})
    elif kind == "p2p" and rank == 0:
        out, gradient = net(torch.randn(4, 8)), torch.empty(4, 8)
        dist.send(out.detach(), 1)
        dist.recv(gradient, 1)
        out.backward(gradient)
    elif kind == "p2p":
        dist.recv(received := torch.empty(4, 8), 0)
        net(received.requires_grad_()).square().mean().backward()
        dist.send(received.grad, 0)
    else:
        net(torch.randn(4, 8)).square().mean().backward()
        for each in net.shared.parameters(): dist.all_reduce(each.grad)
    optimizer.step()
def begin():
    global net, optimizer, wanted, its_optimizer, begun, done, compared
    net, optimizer = build(kind)
    wanted, its_optimizer = build(kind)
    begun, done, compared = [], [], 0
    optimizer.register_step_pre_hook(lambda *_: begun.append(number))
    optimizer.register_step_post_hook(lambda *_: done.append(number))
def train(steps):
    global number
    for _ in range(steps):
        number += 1
        step(net, optimizer, number)
def train_and_stop(stops_after):
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(60))
    train(1)
    open(f"begun{rank}", "w").close()
    if rank == 1 and stops_after: signal.setitimer(signal.ITIMER_REAL, stops_after)
    train(100_000)
def compare():
    global compared
    for each in done[compared:]: step(wanted, its_optimizer, each)
    compared = len(done)
    return all(map(torch.equal, whole(net), whole(wanted)))
number = 0
"""


def interrupt_training(group: Ranks, way: str, seconds: float) -> None:
    """Interrupt a training after a step if the ranks are quick, at once, or in a collective."""
    begun = [Path(f"begun{rank}") for rank in range(group.world_size)]
    for path in begun:
        path.unlink(missing_ok=True)
    limits = "0.0, 0.0" if way == "at once" else "1.0, 10.0"
    handle = group.begin(
        f"last_step.MIN_LIMIT, last_step.MAX_LIMIT = {limits}\n"
        f"train_and_stop({seconds if way == 'aborted' else 0})"
    )
    assert wait_until(lambda: all(map(Path.exists, begun))), way
    time.sleep(seconds + 0.3 * (way == "aborted"))
    group.interrupt()
    group.finish(handle)
    assert handle.verdict is not None
    assert handle.verdict.is_interrupt, handle.verdict.report()


def check(group: Ranks, capsys: Capture) -> None:
    """Train on after an interrupt. The values are right, or a line says that the ranks differ."""
    capsys.readouterr()
    group.run("dist.barrier()")
    remarks = [line for line in capsys.readouterr().out.splitlines() if "nbddp: " in line]
    steps = group.pull("begun, done, number")
    group.run(f"number = {max(number for *_, number in steps)}", quiet=True)
    named = " ".join(line.partition("nbddp: ")[2] for line in remarks)
    if any(each[:2] != steps[0][:2] for each in steps) or steps[0][0] != steps[0][1]:
        assert named, (steps, remarks)
        if source := re.search(r"set to the values of rank (\d)", named):
            begun, done, _ = steps[int(source[1])]
            group.run(f"begun, done = {done}, {done}", quiet=True)
            assert begun == done, named
        else:
            group.run("train(1)\nbegin()")
    else:
        assert not named
    group.run("train(1)\nassert compare(), (kind, done[-5:])")


@pytest.mark.full
@pytest.mark.timeout(60 + 20 * INTERRUPTS)
@pytest.mark.parametrize("kind", RANKS)
def test_a_training_goes_on_after_random_interrupts(
    make_group: MakeRanks, capsys: Capture, kind: str
) -> None:
    draw = random.Random(f"{SEED} {kind}")
    group = make_group(RANKS[kind])
    meshes = MESHES[RANKS[kind]]
    made = ", ".join(f"{kind!r}: init_device_mesh('cpu', {of})" for kind, of in meshes.items())
    group.run(
        f"{imported(last_step)}{SHARDED}meshes = {{{made}}}{TRAINING}kind = {kind!r}\nbegin()"
    )
    for index in range(INTERRUPTS):
        way = ("after a step", "aborted", "at once", "aborted")[index % 4]
        interrupt_training(group, way, draw.uniform(0.01, 0.3))
        check(group, capsys)
