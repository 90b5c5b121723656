"""What stands for a function of nbddp's in a script that is to be free of it."""

from __future__ import annotations

REPLACEMENTS = {
    "Checkpoint": "torch.save() of state_dict()s on rank 0, torch.load() on all, or "
    "torch.distributed.checkpoint",
    "all_gather": "torch.distributed.all_gather_object()",
    "all_reduce": "torch.distributed.all_reduce() of a tensor; for a mean divide by world_size",
    "check_answer": "nothing: take the line away",
    "config": "print(), or whatever keeps your settings",
    "digits": "any dataset: these are scikit-learn's handwritten digits",
    "faults": "nothing: take the line away",
    "loader": "DataLoader with a DistributedSampler, and set_epoch() before each epoch",
    "log": "print(), or whatever collects your metrics",
    "main_rank_first": "if rank == 0: ...; dist.barrier(); if rank > 0: ...",
    "on_main": "if dist.get_rank() == 0: ...",
    "precision": "torch.autocast() and torch.amp.GradScaler()",
    "prepare": "DistributedDataParallel(model.to(device))",
    "sonnets": "any text: these are sonnets of Shakespeare's",
    "track": "the loop itself, or tqdm on rank 0",
}
