"""The collectives of a rank, as torch's flight recorder has them."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbddp.wire.collective import Collective

BUFFER_SIZE = 400  # collectives that it keeps: 3 ms to read
NCCL_OFFSET = 2**40  # added to the numbers of NCCL's records, which are counted apart
DEFAULT_GROUP = "default_pg"  # torch's description of the default group
# of Gloo, whose calls begin when a rank comes to them: nobody is through before all are there
_SYNCHRONIZING = {
    f"gloo:{name}"
    for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "sparse_all_reduce")
}
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One entry of torch's flight recorder.

    Attributes:
        is_in_flight: whether it is not over.
        began_at: in seconds, as ``time.time()`` has it.
        backend: whose it is, such as "gloo".
    """

    call: Collective
    is_in_flight: bool
    began_at: float = 0.0
    backend: str = ""


def read_entries() -> Sequence[Entry]:
    """The last collectives that this process began, oldest first.

    NCCL has a recorder of its own, which a build without CUDA has not; all other backends share
    one. Of a rank that has called NCCL it is NCCL's that are told.
    Pickled and without stacks they take 6 microseconds each; with stacks it would be 400.
    """
    recorder: Any = torch._C._distributed_c10d  # type: ignore[attr-defined, unused-ignore]
    try:
        if hasattr(recorder, "_dump_nccl_trace") and (
            entries := _load_entries(
                recorder._dump_nccl_trace(includeStackTraces=False), NCCL_OFFSET
            )
        ):
            return entries
        return _load_entries(recorder._dump_fr_trace(includeStackTraces=False), 0)
    except MemoryError:  # a cell has taken it all
        return []


def _load_entries(pickled: bytes, offset: int) -> Sequence[Entry]:
    entries: list[Entry] = pickle.loads(pickled).get("entries", [])
    for each in entries if offset else ():
        each["record_id"] += offset
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


def gpu_microseconds(entry: Entry) -> int | None:
    """How long it took on the GPU; None while that is not known, or is not measured.

    NCCL measures it if ``TORCH_NCCL_ENABLE_TIMING`` says so; its watchdog notes it at the end.
    """
    milliseconds = entry.get("duration_ms")
    return None if milliseconds is None else round(1000 * milliseconds)


def is_synchronizing(entry: Entry) -> bool:
    """Whether nobody is through with it before all are there."""
    return entry["profiling_name"] in _SYNCHRONIZING


def newest_collective(calls: Collection[str] = ()) -> RecordedCollective | None:
    """The last collective that this process began; see :func:`newest_of`."""
    return newest_of(read_entries(), calls)


def newest_of(entries: Sequence[Entry], calls: Collection[str] = ()) -> RecordedCollective | None:
    """Return the newest recorded collective, or None.

    Args:
        entries: all entries, oldest first.
        calls: functions on a thread's stack; an unfinished collective of these takes precedence.
    """
    if not entries:
        return None
    in_flight = [each for each in entries if not each["retired"] and _function_name(each) in calls]
    newest = (in_flight or entries)[-1]
    backend, _, name = newest["profiling_name"].partition(":")
    return RecordedCollective(
        call=Collective(
            name, newest["collective_seq_id"], group_name(newest), format_inputs(newest)
        ),
        is_in_flight=not newest["retired"],
        began_at=newest["time_created_ns"] / 1e9,
        backend=backend,
    )


def count_started(group: Any = None) -> int:
    """Return how many collectives a group has begun, the default group if none is given.

    It is 0 if there is no default group, or if a custom backend does not count.
    """
    if group is None:
        if not dist.is_initialized():
            return 0
        group = dist.distributed_c10d._get_default_group()
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def _function_name(entry: Entry) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2].lstrip("_")


def group_name(entry: Entry) -> str:
    """How its group is called: by its ranks, while it lives; empty for the default one."""
    name, description = entry.get("process_group", ["", DEFAULT_GROUP])
    if description == DEFAULT_GROUP:
        return ""
    world: Any = dist.distributed_c10d._world
    for group, known_name in list(world.pg_names.items()):
        if known_name == name and group in world.pg_group_ranks:  # missing during its creation
            return str(list(world.pg_group_ranks[group]))
    return repr(description) if description != "undefined" else name[:8]


def format_inputs(entry: Entry) -> str:
    """Type and sizes of what goes in, as ``float [3, 4]``."""
    kinds, sizes = entry.get("input_dtypes", []), entry.get("input_sizes", [])
    parts = [f"{kind.lower()} {size}" for kind, size in zip(kinds, sizes, strict=False)]
    return ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")
