"""Give a new rank the shards of the dead one: from a replica of them, as HSDP has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from nbddp.worker.heal.spread_state import Objects, Parts, pack, parts_of, unpack
from nbddp.worker.process_group.unfinished_steps import StepReport


def ranks_without_replica(objects: Objects, world_size: int, new_ranks: Set[int]) -> list[int]:
    """Return the new ranks whose shards no other rank has."""
    parts = [parts_of(objects, rank) for rank in range(world_size)]
    survivors = [parts[rank] for rank in range(world_size) if rank not in new_ranks]
    return [rank for rank in sorted(new_ranks) if parts[rank] not in survivors]


def choose_sources(
    parts: Sequence[Parts], steps: Sequence[StepReport], new_ranks: Set[int]
) -> list[int]:
    """Return for each rank the rank whose state it gets; its own number if it keeps its state.

    Return nothing if no ranks of the same step have all parts.

    All sources have made the same steps, and finished them. Otherwise the models of the ranks would
    not fit together. Ranks that have made the most steps are preferred.

    Args:
        parts: for each rank, its part of each tensor.
        steps: for each rank, the steps of its optimizers.
        new_ranks: ranks with a new process.

    >>> rows = [[[0]], [[1]], [[0]], [[1]]]
    >>> before, after = {"optimizer": [4, 4, "shards"]}, {"optimizer": [5, 5, "shards"]}
    >>> choose_sources(rows, [before, {}, before, before], {1})
    [0, 3, 2, 3]
    >>> choose_sources(rows, [after, {}, before, before], {1})
    [2, 3, 2, 3]
    """
    spread = [
        {name: counts for name, (*counts, kind) in report.items() if kind} for report in steps
    ]
    whole = {
        rank: {name: finished for name, (_, finished) in counts.items()}
        for rank, counts in enumerate(spread)
        if rank not in new_ranks and all(begun == finished for begun, finished in counts.values())
    }
    for made in sorted(whole.values(), key=lambda each: -sum(each.values())):
        holders = [rank for rank, counts in whole.items() if counts == made]
        sources = [
            next((each for each in [rank, *holders] if each in holders and parts[each] == p), -1)
            for rank, p in enumerate(parts)
        ]
        if -1 not in sources:
            return sources
    return []


def copy_from_replicas(
    objects: Objects,
    steps: Sequence[StepReport],
    new_ranks: Set[int],
    wait: Callable[[Any], None],
) -> bool:
    """Copy the state of sharded models to the ranks that lack it. All ranks call this.

    Return false on all ranks if no ranks of the same step have all shards.

    Args:
        objects: sharded models and optimizers.
        steps: as for :func:`choose_sources`.
        new_ranks: ranks with a new process.
        wait: waits for a message.
    """
    parts = [parts_of(objects, rank) for rank in range(dist.get_world_size())]
    sources = choose_sources(parts, steps, new_ranks)
    if not sources:
        return False
    own_rank = dist.get_rank()
    targets = [rank for rank, source in enumerate(sources) if source == own_rank != rank]
    packed = pack(objects) if targets else torch.empty(0)
    received = send_and_receive(dict.fromkeys(targets, packed), sources[own_rank], wait)
    if received is not None:
        unpack(objects, received)
    return True


def send_and_receive(
    sent: Mapping[int, torch.Tensor], source: int, wait: Callable[[Any], None]
) -> torch.Tensor | None:
    """Send packed states to ranks. Return the one of ``source``; None if it is this rank."""
    messages = [
        dist.isend(part, rank)
        for rank, packed in sent.items()
        for part in (torch.tensor([packed.numel()]), packed)
    ]
    received = None
    if source != dist.get_rank():
        size = torch.empty(1, dtype=torch.int64)
        wait(dist.irecv(size, source))
        received = torch.empty(int(size), dtype=torch.uint8)
        wait(dist.irecv(received, source))
    for message in messages:
        wait(message)
    return received
