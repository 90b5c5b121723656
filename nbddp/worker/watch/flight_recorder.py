"""Read the collectives of a rank from torch's flight recorders."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbddp.extension.backend import lasting, registered
from nbddp.wire.collective import Collective

BUFFER_SIZE = 400  # collectives that the recorder keeps: 3 ms to read
DEFAULT_GROUP = "default_pg"  # torch's description of the default group
# Gloo calls that end on no rank before all ranks have started them
_SYNCHRONIZING = {"all_gather", "all_reduce", "all_to_all", "barrier", "sparse_all_reduce"}
_USUAL_BACKENDS = {"gloo", "nccl2"}  # read also after their groups were destroyed
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
    """Return the last collectives that this process started on all backends, oldest first.

    In addition to torch's keys, an entry has "name" (the function), "backend" and "recorder". Each
    recorder counts its own "record_id". Reading an entry, pickled and without stacks, takes
    6 microseconds; with stacks it would take 400.
    """
    try:
        entries = [entry for dump in _dumps() for entry in _load_entries(*dump)]
        entries += [entry for backend in registered() for entry in backend.entries()]
    except MemoryError:  # the cell has used all memory
        return []
    return sorted(entries, key=lambda entry: (entry["time_created_ns"], entry["record_id"]))


def _dumps() -> Iterator[tuple[str, bytes]]:
    """Return the name and the pickled entries of each recorder.

    The old NCCL backend has its own recorder, which builds without CUDA lack. Until torch 2.14 all
    other backends share one. Since torch 2.15 each backend has one under the name that the backend
    returns; an unknown name gives an empty dump.
    """
    module: Any = torch._C._distributed_c10d  # type: ignore[attr-defined, unused-ignore]
    if hasattr(module, "_dump_nccl_trace"):
        yield "nccl", module._dump_nccl_trace(includeStackTraces=False)
    if "backend:" not in (module._dump_fr_trace.__doc__ or ""):
        yield "shared", module._dump_fr_trace(includeStackTraces=False)
        return
    for name in _USUAL_BACKENDS | set(_backend_names()):
        yield name, module._dump_fr_trace(includeStackTraces=False, backend=name)


def _backend_names() -> Iterator[str]:
    world: Any = dist.distributed_c10d._world
    for group in list(world.pg_names):
        for device in group._device_types:
            yield group._get_backend(device).name()


def _load_entries(recorder: str, pickled: bytes) -> Sequence[Entry]:
    entries: list[Entry] = pickle.loads(pickled).get("entries", [])
    for entry in entries:
        backend, _, name = entry["profiling_name"].rpartition(":")
        entry |= {"recorder": recorder, "backend": backend, "name": name}
    return entries


def is_synchronizing(entry: Entry) -> bool:
    """Return whether the collective ends on no rank before all ranks have started it."""
    is_of_gloo = entry["backend"] == "gloo" and entry["name"] in _SYNCHRONIZING
    return is_of_gloo or entry.get("is_synchronizing", False)


def record_key(entry: Entry) -> tuple[str, int]:
    """Return a key that no other entry of this process has."""
    return entry["recorder"], int(entry["record_id"])


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
    in_flight = [
        entry for entry in entries if not entry["retired"] and entry["name"].lstrip("_") in calls
    ]
    newest = (in_flight or entries)[-1]
    return RecordedCollective(
        call=Collective(
            newest["name"], newest["collective_seq_id"], group_name(newest), format_inputs(newest)
        ),
        is_in_flight=not newest["retired"],
        began_at=newest["time_created_ns"] / 1e9,
        backend=newest["backend"],
    )


def count_started(group: Any = None) -> int:
    """Return the number of collectives that a group has started, by default the default group.

    Return 0 without a default group, and for custom backends that do not count.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        return 0
    if (lasting_group := lasting(group)) is not None:
        return lasting_group.started
    try:
        # The group's own function reads the first backend, which an interrupt may have ended.
        backend = group._get_backend(group._device_types[0])
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return 0


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
