"""The collectives of a rank, as torch's flight recorder has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

DEFAULT = "default_pg"  # torch's description of the default group
# of Gloo, whose calls begin when a rank comes to them: nobody is through before all are there
_MEETINGS = {f"gloo:{name}" for name in ("all_gather", "all_reduce", "all_to_all", "barrier")} | {
    "gloo:sparse_all_reduce"
}
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder.

    Attributes:
        name: the function.
        number: which one of its group it is; each group counts its own.
        is_in_flight: whether it is not over.
        shape: type and sizes of what goes in.
        began_at: in seconds, as ``time.time()`` has it.
        group: the group's ranks, as ``[0, 2]``; empty for the default group.
        record: which one it is of all that this process began.
        backend: whose it is, such as "gloo".
    """

    name: str
    number: int
    is_in_flight: bool
    shape: str = ""
    began_at: float = 0.0
    group: str = ""
    record: int = 0
    backend: str = ""

    @property
    def title(self) -> str:
        """Which one it is, as ``all_reduce #3 of group [0, 2]``."""
        return f"{self.name} #{self.number}" + (f" of group {self.group}" if self.group else "")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.title, self.shape)))


def recorded() -> Sequence[Entry]:
    """The last collectives that this process began."""
    recorder: Any = torch._C._distributed_c10d  # type: ignore[attr-defined, unused-ignore]
    try:
        entries: list[Entry] = json.loads(recorder._dump_fr_trace_json()).get("entries", [])
    except MemoryError:  # a cell has taken it all
        return []
    return entries


def arrivals(entries: Sequence[Entry], *, since: float, after: int) -> list[list[Any]]:
    """When this rank came to those of the default group: ``[number, time, meets]`` of each.

    Args:
        entries: what is recorded.
        since: earlier ones are left out; a ``time.time()``.
        after: so are those up to this record.
    """
    found = [
        each
        for each in sorted(entries, key=lambda entry: int(entry["record_id"]))
        if int(each["record_id"]) > after
        and each["time_created_ns"] / 1e9 >= since
        and each.get("process_group", ["", DEFAULT])[1] == DEFAULT
        and not each.get("is_p2p")
    ]
    return [
        [
            each["collective_seq_id"],
            round(each["time_created_ns"] / 1e9, 6),
            each["profiling_name"] in _MEETINGS,
        ]
        for each in found
    ]


def newest_collective() -> Collective | None:
    """The last collective that this process began."""
    return newest_of(recorded())


def newest_of(entries: Sequence[Entry]) -> Collective | None:
    """The last one that is recorded."""
    if not entries:
        return None
    newest = max(entries, key=lambda entry: int(entry["record_id"]))
    backend, _, name = newest["profiling_name"].partition(":")
    return Collective(
        name=name,
        number=newest["collective_seq_id"],
        is_in_flight=not newest["retired"],
        shape=_shape(newest),
        began_at=newest["time_created_ns"] / 1e9,
        group=_group(*newest.get("process_group", ["", DEFAULT])),
        record=int(newest["record_id"]),
        backend=backend,
    )


def _group(name: str, description: str) -> str:
    """How a group that is not the default one is called: by its ranks, while it lives."""
    if description == DEFAULT:
        return ""
    for group, known in list(dist.distributed_c10d._world.pg_names.items()):
        if known == name:
            return str(dist.get_process_group_ranks(group))
    return repr(description) if description != "undefined" else name[:8]


def _shape(entry: Entry) -> str:
    """Type and sizes of what goes in, as ``float [3, 4]``."""
    kinds, sizes = entry.get("input_dtypes", []), entry.get("input_sizes", [])
    parts = [f"{kind.lower()} {size}" for kind, size in zip(kinds, sizes, strict=False)]
    return ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")
