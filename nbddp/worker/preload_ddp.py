"""Imported by the grown forkserver: what the first DDP model would import in every rank.

None of it touches CUDA while it is imported.
"""

from __future__ import annotations

import gc

import torch._dynamo
import torch.nn.parallel.distributed
import torch.optim  # noqa: F401

gc.collect()
gc.freeze()  # what ranks share stays shared: their collectors leave it alone
