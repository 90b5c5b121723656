"""A small regression to train with other packages, and its result in one process."""

from __future__ import annotations

import torch
from torch import nn

# in a rank: the model, the data and their loader, in batches of 8; 0.1 is the learning rate
SOURCE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make_model():
    torch.manual_seed(7)
    return nn.Linear(4, 1)

def make_loader(repeats=1):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).repeat(repeats, 1)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
"""


def trained(*, epochs: int, shuffles: bool = False) -> list[float]:
    """Return the weights after training in one process on the joined batches of two ranks.

    ``shuffles``: as torch's DistributedSampler does.
    """
    torch.manual_seed(7)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for epoch in range(epochs):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        for batch in (x[order] if shuffles else x).split(16):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
    weights: list[float] = model.weight[0].tolist()
    return weights
