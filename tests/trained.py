"""A trained group, expressions that show its state, and deaths in it."""

import os
import signal

from drivers.ranks import Ranks
from processes import wait_until

TRAINED = """
import threading
torch.manual_seed(rank)
scale = 3
def scaled(x):
    return x * scale
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.norm = torch.nn.BatchNorm1d(1)
    def forward(self, x):
        return scaled(self.norm(self.layer(x)))
model = nbddp.prepare(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = nbddp.loader(torch.randn(96, 8), 4, seed=2)
def train(steps):
    for _, batch in zip(range(steps), loader):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()
train(3)
big = torch.arange(1_000_000)
at = big.data_ptr()
threading.trained_here = True  # an attribute of a module: no heal carries it
gate = threading.Lock()
"""
STATE = """
train(2)
{
    "rank": rank, "big": big.sum().item(),
    "at": big.data_ptr() == at and hasattr(threading, "trained_here"),
    "weights": [each.tolist() for each in model.parameters()],
    "moments": [each["exp_avg"].tolist() for each in optimizer.state.values()],
    "owned": {id(each) for each in optimizer.state} <= {id(each) for each in model.parameters()},
    "lr": schedule.get_last_lr(), "position": (loader.epoch, loader.step),
    "sees": scaled.__globals__ is globals(), "scaled": scaled(2),
}
"""


def kill(group: Ranks, *ranks: int) -> None:
    pids = group.pids
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    assert wait_until(lambda: not {*ranks} & {*group.alive})
