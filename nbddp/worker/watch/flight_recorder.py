"""Read the collectives of a rank from torch's flight recorder."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbddp.wire.collective import Collective

BUFFER_SIZE = 400  # collectives that the recorder keeps: 3 ms to read
NCCL_OFFSET = 2**40  # added to NCCL's record numbers, which are counted separately
DEFAULT_GROUP = "default_pg"  # torch's description of the default group
# Gloo calls that end on no rank before all ranks have started them
_SYNCHRONIZING = {
    f"gloo:{name}"
    for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "sparse_all_reduce")
}
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One entry of torch's flight recorder.

    Attributes:
        is_in_flight: whether it has not ended.
        began_at: its start, in seconds as in ``time.time()``.
        backend: its backend, such as "gloo".
    """

    call: Collective
    is_in_flight: bool
    began_at: float = 0.0
    backend: str = ""


def read_entries() -> Sequence[Entry]:
    """Return the last collectives that this process started, oldest first.

    NCCL has its own recorder, which builds without CUDA lack. All other backends share one. If the
    rank has called NCCL, return NCCL's entries. Reading an entry, pickled and without stacks, takes
    6 microseconds; with stacks it would take 400.
    """
    recorder: Any = torch._C._distributed_c10d  # type: ignore[attr-defined, unused-ignore]
    try:
        if hasattr(recorder, "_dump_nccl_trace"):
            dump = recorder._dump_nccl_trace(includeStackTraces=False)
            if entries := _load_entries(dump, NCCL_OFFSET):
                return entries
        return _load_entries(recorder._dump_fr_trace(includeStackTraces=False), 0)
    except MemoryError:  # the cell has used all memory
        return []


def _load_entries(pickled: bytes, offset: int) -> Sequence[Entry]:
    entries: list[Entry] = pickle.loads(pickled).get("entries", [])
    for each in entries if offset else ():
        each["record_id"] += offset
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


def is_synchronizing(entry: Entry) -> bool:
    """Return whether the collective ends on no rank before all ranks have started it."""
    return entry["profiling_name"] in _SYNCHRONIZING


def newest_collective(calls: Collection[str] = ()) -> RecordedCollective | None:
    """Return the last collective that this process started; see :func:`newest_of`."""
    return newest_of(read_entries(), calls)


def newest_of(entries: Sequence[Entry], calls: Collection[str] = ()) -> RecordedCollective | None:
    """Return the newest recorded collective, or None.

    Args:
        entries: all entries, oldest first.
        calls: the functions on a thread's stack. An unfinished collective of these is preferred.
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
    """Return the number of collectives that a group has started, by default the default group.

    Return 0 without a default group, and for custom backends that do not count.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def _function_name(entry: Entry) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2].lstrip("_")


def group_name(entry: Entry) -> str:
    """Return the name of the group: its ranks while it exists, or "" for the default group."""
    name, description = entry.get("process_group", ["", DEFAULT_GROUP])
    if description == DEFAULT_GROUP:
        return ""
    world: Any = dist.distributed_c10d._world
    for group, known_name in list(world.pg_names.items()):
        if known_name == name and group in world.pg_group_ranks:  # absent during its creation
            return str(list(world.pg_group_ranks[group]))
    return repr(description) if description != "undefined" else name[:8]


def format_inputs(entry: Entry) -> str:
    """Return the types and sizes of the inputs, such as ``float [3, 4]``."""
    kinds, sizes = entry.get("input_dtypes", []), entry.get("input_sizes", [])
    parts = [f"{kind.lower()} {size}" for kind, size in zip(kinds, sizes, strict=False)]
    return ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")
