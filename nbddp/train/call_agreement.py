"""How ranks meet: they find out whether all are in the same call, and tell each other objects."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from nbddp.errors import ArgumentError, RequestError
from nbddp.train import this_rank

T = TypeVar("T")

Group = dist.ProcessGroup | None  # None for that of all ranks

not_collective: ContextVar[str] = ContextVar("nbddp_apart", default="")  # what ranks do one by one


def check_member(call_name: str, group: Group) -> None:
    """See that this rank is in the group.

    Raises:
        ArgumentError: it is not.
    """
    if this_rank.world_size(group) < 1:
        raise ArgumentError(f"nbddp.{call_name}: rank {this_rank.rank()} is not in the group")


def check_same_call(call_name: str, value: T, group: Group = None) -> dict[int, T]:
    """Meet the other ranks: what each brought, or nothing if all brought the same.

    The usual case is found out with a number from each. Who waits here for a rank that does not
    come is named after a while, as in any collective. An all_gather, as it never meets the
    all_reduce of a rank that is in its backward(): of two of these with other sizes Gloo aborts.

    Raises:
        RequestError: they are in something else than ``what``, or cannot come.
    """
    if this_rank.world_size(group) == 1:
        return {}
    if not_collective.get():
        raise RequestError(
            f"{call_name} inside {not_collective.get()}: the ranks are not together there; call it "
            "before or after, on all ranks"
        )
    content = repr((call_name, value)).encode()
    digest = int.from_bytes(blake2b(content, digest_size=7).digest(), "big")
    own_digest = torch.tensor([digest], device=communication_device(group))
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
    """What each rank has, by its rank in the world."""
    values: list[Any] = [None] * this_rank.world_size(group)
    with using_communication_device(group):
        dist.all_gather_object(values, value, group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), values, strict=True))


def format_by_rank(found: Mapping[int, str]) -> str:
    """What each rank has, in words.

    >>> format_by_rank({0: "int", 2: "float"})
    'rank 0: int, rank 2: float'
    """
    return ", ".join(f"rank {rank}: {each}" for rank, each in found.items())


# ---- objects


class CallOutcome(NamedTuple):
    """What a rank sends: why it failed, or something pickled."""

    failure: str = ""
    payload: bytes = b""


def pickle_outcome(value: object) -> CallOutcome:
    """The value pickled, or why that cannot be."""
    try:
        return CallOutcome(payload=pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises is told
        return CallOutcome(failure=str(error))


def broadcast_outcome(outcome: CallOutcome) -> CallOutcome:
    """That of rank 0, on every rank."""
    if this_rank.world_size() == 1:
        return outcome
    objects: list[Any] = [outcome]
    with using_communication_device():
        dist.broadcast_object_list(objects, src=0)
    return cast(CallOutcome, objects[0])


# ---- devices


def communication_device(group: Group = None) -> torch.device:
    """Where tensors must be for the process group to send them; NCCL knows GPUs only."""
    uses_gpus = dist.is_initialized() and dist.get_backend(group) == "nccl"
    return this_rank.device() if uses_gpus else torch.device("cpu")


def using_communication_device(group: Group = None) -> AbstractContextManager[Any]:
    """Objects travel over the current GPU, which a script may not have set."""
    device = communication_device(group)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
