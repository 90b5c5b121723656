"""Mistakes that only ranks can show, a small cell of each, and the rule that should find it."""

from __future__ import annotations

from dataclasses import dataclass

SETUP = """
import time
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader, DistributedSampler, Subset, TensorDataset, random_split
)
torch.manual_seed(3407)
data = TensorDataset(torch.randn(61, 4), torch.randint(3, (61,)))

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

model = DDP(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=3407)
train = DataLoader(data, batch_size=16, sampler=sampler)
test = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

def fit(model, train, optimizer):
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Seed:
    """A mistake.

    Attributes:
        rule: who should find it; empty where it is known that nobody does.
        runs: whether ranks can run the cell: others hang, or want a GPU.
    """

    name: str
    rule: str
    cell: str
    runs: bool = True


SEEDS = (
    Seed(
        "one rank trains a step more",
        "ND102",
        "x, y = data[:16]\nif rank == 0:\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n    optimizer.step()",
        runs=False,
    ),
    Seed(
        "a loader of another cell's that shuffles by itself",
        "ND201",
        "for x, y in alone:\n    optimizer.zero_grad()\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n    optimizer.step()",
    ),
    Seed(
        "every epoch in the same order",
        "ND210",
        "for epoch in range(2):\n    for x, y in train:\n        optimizer.zero_grad()\n"
        "        nn.functional.cross_entropy(model(x), y).backward()\n        optimizer.step()",
    ),
    Seed(
        "a seed of each rank's own for the sampler",
        "ND202",
        "my_seed = 3407 + rank\nown = DistributedSampler(data, seed=my_seed)\n"
        "mine = DataLoader(data, batch_size=16, sampler=own)",
    ),
    Seed(
        "a sampler for one process",
        "ND203",
        "sole = DistributedSampler(data, num_replicas=1, rank=0)\n"
        "everything = DataLoader(data, batch_size=16, sampler=sole)",
    ),
    Seed(
        "another split on each rank",
        "ND205",
        "torch.manual_seed(rank)\nhalf, rest = random_split(data, [30, 31])\n"
        "halves = DataLoader(half, batch_size=8, sampler=DistributedSampler(half))",
    ),
    Seed(
        "shares of unequal length",
        "ND206",
        "share = Subset(data, range(40) if rank == 0 else range(40, 61))\n"
        "shares = DataLoader(share, batch_size=8)\nfor x, y in shares:\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n    break",
    ),
    Seed(
        "accumulated gradients four times as large",
        "ND121",
        "for i, (x, y) in enumerate(train):\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n"
        "    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
    ),
    Seed(
        "one rank's accuracy for the whole",
        "ND133",
        "model.eval()\nright = 0\nwith torch.no_grad():\n    for x, y in test:\n"
        "        right += (model(x).argmax(1) == y).sum().item()\n"
        "print('accuracy', right / len(data))\nmodel.train();",
    ),
    Seed(
        "a parameter that only one rank changes",
        "ND207",
        "with torch.no_grad():\n    model.module[0].weight.mul_(1 + 0.01 * rank)",
    ),
    Seed(
        "one rank stops early",
        "",
        "for x, y in train:\n    optimizer.zero_grad()\n"
        "    loss = nn.functional.cross_entropy(model(x), y)\n    loss.backward()\n"
        "    optimizer.step()\n    if loss.item() < 0.01:\n        break",
    ),
    Seed(
        "a head that is not used",
        "ND216",
        "class Two(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)\n\n"
        "    def forward(self, x):\n        return self.used(x)\n\n"
        "two = DDP(Two())\ntwo(data[:16][0]).sum().backward()",
    ),
)
MORE = (
    Seed("the wrapper in a cell that runs twice", "ND214", "wrapped = DDP(model)"),
    Seed("more threads than cores", "ND212", "torch.set_num_threads(64)"),
    Seed(
        "more loader processes than cores",
        "ND213",
        "many = DataLoader(data, num_workers=300, sampler=sampler)",
    ),
    Seed(
        "a model made again, and not its optimizer",
        "ND215",
        "model = DDP(make_model())\nx, y = data[:16]\noptimizer.zero_grad()\n"
        "nn.functional.cross_entropy(model(x), y).backward()\noptimizer.step()",
    ),
    Seed(
        "a learning rate of each rank's own",
        "ND208",
        "for each in optimizer.param_groups:\n    each['lr'] = 0.1 / (1 + rank)",
    ),
    Seed(
        "a stream that nobody deals out",
        "ND201",
        "class Rows(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
        "        for i in range(32):\n            yield torch.full((4,), i / 32), i % 3\n\n"
        "rows = DataLoader(Rows(), batch_size=8)\nfor x, y in rows:\n    optimizer.zero_grad()\n"
        "    nn.functional.cross_entropy(model(x), y).backward()\n    optimizer.step()",
    ),
    Seed(
        "a list of files in another order on each rank",
        "ND205",
        "import random\nfiles = [f'{n}.pt' for n in range(40)]\n"
        "random.Random(rank).shuffle(files)\n"
        "of_files = DataLoader(files, batch_size=8, sampler=DistributedSampler(files))",
    ),
    Seed(
        "a loader that shuffles by itself, in a function",
        "ND201",
        "loader = DataLoader(data, batch_size=16, shuffle=True)\nfit(model, loader, optimizer)",
    ),
)
