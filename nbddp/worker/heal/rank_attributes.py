"""Set attributes and items that hold a rank number, in objects that came from another rank.

Most code reads its rank once and stores it, as ``DistributedSampler`` does. With the donor's number
a replacement would train on the donor's share of the data, without an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from nbddp.worker.process_group.bound_objects import instances
from nbddp.worker.watch.namespace import Part, walk

NAMES = {
    "rank": "RANK",
    "global_rank": "RANK",
    "process_index": "RANK",
    "local_rank": "LOCAL_RANK",
    "local_process_index": "LOCAL_RANK",
}


def find_rank_attributes(namespace: Mapping[str, Any], preset: set[str]) -> list[str]:
    """Return the paths of attributes and items that hold this rank's number.

    Args:
        namespace: the user's variables.
        preset: variables that each rank sets itself.
    """
    return [each.path for each in _attributes(namespace, preset) if _has_own_number(each)]


def set_rank_attributes(
    namespace: Mapping[str, Any], preset: set[str], paths: set[str]
) -> list[str]:
    """Set these attributes and items to this rank's number. Return the paths that changed."""
    attributes = [each for each in _attributes(namespace, preset) if each.path in paths]
    changed = [each for each in attributes if not _has_own_number(each)]
    for attr in changed:
        held = attr.holder if isinstance(attr.holder, dict) else vars(attr.holder)
        held[attr.key] = _number(attr.key)  # works even if the class forbids setting attributes
    return [each.path for each in changed]


def set_sampler_ranks(donor: int) -> int:
    """Give samplers with the donor's share this rank's share. Return how many there were."""
    data = sys.modules["torch.utils.data"]
    own_rank, size = dist.get_rank(), dist.get_world_size()
    samplers = instances([data.DistributedSampler])
    wrong = [each for each in samplers if (each.rank, each.num_replicas) == (donor, size)]
    for sampler in wrong:
        sampler.rank = own_rank
    return len(wrong)


def _attributes(namespace: Mapping[str, Any], preset: set[str]) -> Iterator[Part]:
    """Yield attributes and items that could hold a rank number.

    Modules are skipped: their ``rank`` is usually that of a matrix.
    """
    names = {name: value for name, value in namespace.items() if name not in preset}
    for part in walk(names):
        if part.key in NAMES and not isinstance(part.holder, nn.Module):
            yield part._replace(holder=namespace) if part.holder is names else part


def _has_own_number(part: Part) -> bool:
    return type(part.value) is int and part.value == _number(part.key)


def _number(key: str) -> int:
    return int(os.environ[NAMES[key]])
