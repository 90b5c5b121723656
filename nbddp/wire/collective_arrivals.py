"""The message with a rank's collectives: arrival times, source lines and waits."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from nbddp.wire.frozen import Frozen


class CollectiveArrivals(Frozen):
    """When a rank arrived at the collectives of a cell since its last report, in call order.

    All times are whole microseconds. Instants count from ``base``. Lists of pairs and triples are
    flat.

    Attributes:
        cell: number of the cell.
        base: in seconds of ``time.time()``.
        kinds: ``[name, shape, group, waits_for_all, turn]`` of each kind of collective. ``group``
            is empty for the default group, else its ranks, as "[0, 2]". ``waits_for_all`` tells
            whether all ranks must arrive before any rank can go on. ``turn`` counts how often the
            numbers of the group started again.
        rows: for each collective its number in its group, the time, and its index in ``kinds``.
        cell_lines: lines of the cell, ``[line, file]``.
        samples: a time, and the index in ``cell_lines`` of the line at that time.
        batch_waits: begin and end of each wait for a batch of data.
        lost: collectives that the flight recorder dropped before they were read.
        omitted: collectives left out of this message because there were too many.
        sent_at: when this message was made.
        is_over: whether the cell had ended by then.
        durations: for each collective that NCCL has measured on the GPU since the last report, its
            microseconds and its index in ``kinds``.
        awake_time: how long the main thread was not asleep since the last report, estimated from
            samples.
        cpu_time: how long the main thread had a core since the last report.
    """

    cell: int
    base: float
    kinds: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    cell_lines: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    batch_waits: list[Any] = field(default_factory=list)
    lost: int = 0
    omitted: int = 0
    sent_at: int = 0
    is_over: bool = False
    durations: list[Any] = field(default_factory=list)
    awake_time: int = 0
    cpu_time: int = 0
