"""What a rank tells of its collectives: when it came to each, where it was, what it waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArrivals:
    """When a rank came to the collectives of a cell since it last told, in the order of its calls.

    All times are whole microseconds since ``base``, which is in seconds of ``time.time()``.
    ``kinds`` says what there was: ``[name, shape, group, meets, turn]`` of each, where ``group``
    is empty for the default one and else its ranks, as "[0, 2]"; ``meets`` tells whether nobody is
    through before all are there; ``turn`` counts how often the group's numbers began anew.
    ``rows`` are three numbers for each collective, one after the other: its number in its group,
    the time, and its place in ``kinds``. ``lost`` were forgotten by the flight recorder before
    they were read, ``thinned`` left out here for being too many. ``places`` are lines of the cell,
    ``[line, file]``; ``samples`` tell at which of them the rank was: the time and the place, one
    after the other. ``loads`` are begin and end of each wait for a batch of data, one after the
    other. ``until`` is when this was said, and ``is_over`` tells whether the cell was over then.
    ``awake`` are the microseconds, since it last told, in which the main thread was not asleep, an
    estimate from where it was looked at, and ``cpu`` those in which it had a core.
    ``durations`` are two numbers for each collective that NCCL has measured on the GPU since: its
    microseconds there, and its place in ``kinds``.
    """

    cell: int
    base: float
    kinds: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)
    lost: int = 0
    thinned: int = 0
    until: int = 0
    is_over: bool = False
    durations: list[Any] = field(default_factory=list)
    awake: int = 0
    cpu: int = 0
