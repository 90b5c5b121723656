"""Check that all ranks are in the same call, and exchange Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from nbddp import accelerator
from nbddp.errors import ArgumentError, RequestError
from nbddp.reporting import this_rank

T = TypeVar("T")

Group = dist.ProcessGroup | None  # None: the process group of all ranks

# the name of the call that this rank runs without the other ranks, such as nbddp.on_main(save)
not_collective: ContextVar[str] = ContextVar("nbddp_not_collective", default="")


def check_member(call_name: str, group: Group) -> None:
    """Check that this rank is in the group.

    Raises:
        ArgumentError: this rank is not in the group.
    """
    if this_rank.world_size(group) < 1:
        raise ArgumentError(f"nbddp.{call_name}: rank {this_rank.rank()} is not in the group")


def check_same_call(call_name: str, value: T, group: Group = None) -> dict[int, T]:
    """Check that all ranks are in the same call, and compare their values.

    In the usual case, each rank sends one number. If a rank does not arrive, the hang detector
    names it, as for any collective. The function uses all_gather because it never matches the
    all_reduce of a rank in backward(): Gloo aborts if two all_reduce calls differ in size.

    Returns:
        The values by rank; empty if all ranks have the same value.

    Raises:
        RequestError: another rank is in a different call, or this rank runs without the others.
    """
    if this_rank.world_size(group) == 1:
        return {}
    if not_collective.get():
        raise RequestError(
            f"{call_name} inside {not_collective.get()}: the ranks do not run that part together; "
            "call it before or after, on all ranks"
        )
    content = repr((call_name, value)).encode()
    digest = int.from_bytes(blake2b(content, digest_size=7).digest(), "big")
    own_digest = torch.tensor([digest], device=this_rank.communication_device(group))
    digests = [torch.empty_like(own_digest) for _ in range(this_rank.world_size(group))]
    dist.all_gather(digests, own_digest, group)
    if len(set(torch.cat(digests).tolist())) == 1:
        return {}
    calls = gather_by_rank((call_name, value), group)
    names = {rank: each for rank, (each, _) in calls.items()}
    if len(set(names.values())) > 1:
        raise RequestError(f"the ranks are in different calls: {format_by_rank(names)}")
    return {rank: each for rank, (_, each) in calls.items()}


def gather_by_rank(value: T, group: Group) -> dict[int, T]:
    """Gather a value from each rank; return the values by rank in the world."""
    values: list[Any] = [None] * this_rank.world_size(group)
    with using_communication_device(group):
        dist.all_gather_object(values, value, group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), values, strict=True))


def format_by_rank(found: Mapping[int, str]) -> str:
    """Format a text of each rank.

    >>> format_by_rank({0: "int", 2: "float"})
    'rank 0: int, rank 2: float'
    """
    return ", ".join(f"rank {rank}: {each}" for rank, each in found.items())


# ---- objects


class CallOutcome(NamedTuple):
    """The result of a call on one rank: a failure text or a pickled value."""

    failure: str = ""
    payload: bytes = b""


def pickle_outcome(value: object) -> CallOutcome:
    """Pickle a value; the outcome is a failure if that is impossible."""
    try:
        return CallOutcome(payload=pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - a value's own code may raise anything
        return CallOutcome(failure=str(error))


def broadcast_outcome(outcome: CallOutcome) -> CallOutcome:
    """Return the outcome of rank 0 on every rank."""
    if this_rank.world_size() == 1:
        return outcome
    objects: list[Any] = [outcome]
    with using_communication_device():
        dist.broadcast_object_list(objects, src=0)
    return cast(CallOutcome, objects[0])


# ---- devices


def using_communication_device(group: Group = None) -> AbstractContextManager[Any]:
    """Set the current GPU, which torch uses to send objects; a script may not have set it."""
    device = this_rank.communication_device(group)
    return nullcontext() if device.type == "cpu" else accelerator.current().module.device(device)
