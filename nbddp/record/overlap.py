"""What DistributedDataParallel measures of itself: computing, communication, and the overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """DDP's own measurements of one model on one rank, in seconds, as averages.

    torch samples the first iterations and every hundredth after them.

    Attributes:
        name: what the cell calls the model.
        iteration: the last one that was sampled.
        forward: computing the forward pass.
        backward: from the first to the last gradient of the backward pass.
        communication: from the first bucket that is sent to the last that arrives, with the waiting
            for the last rank.
        overlapped: the part of the communication during the backward pass.
        buckets: their sizes in bytes, in the order in which they are sent.
    """

    rank: int
    name: str
    iteration: int
    forward: float
    backward: float
    communication: float
    overlapped: float
    buckets: tuple[int, ...] = ()

    @property
    def exposed(self) -> float:
        """The seconds of communication during which nothing is computed."""
        return max(0.0, self.communication - self.overlapped)


def overlap_of(
    rank: int, name: str, measured: Mapping[str, Any], *, since: float = 0.0
) -> Overlap | None:
    """Read what ``_get_ddp_logging_data()`` of a model returned; None if it measured nothing since.

    Args:
        rank: whose model it is.
        name: what the cell calls it.
        measured: what it says.
        since: in seconds of the rank's ``time.time()``.

    >>> overlap_of(0, "model", {"iteration": 3}) is None
    True
    """
    if not measured.get("avg_forward_compute_time"):
        return None
    if since and _seconds(measured, "backward_compute_time_end") < since:
        return None
    sizes = measured.get("rebuilt_bucket_sizes") or measured.get("bucket_sizes") or ""
    return Overlap(
        rank=rank,
        name=name,
        iteration=int(measured.get("iteration", 0)),
        forward=_seconds(measured, "avg_forward_compute_time"),
        backward=_seconds(measured, "avg_backward_compute_time"),
        communication=_seconds(measured, "avg_backward_comm_time"),
        overlapped=_seconds(measured, "avg_backward_compute_comm_overlap_time"),
        buckets=tuple(int(each) for each in str(sizes).split(",") if each.strip()),
    )


def _seconds(measured: Mapping[str, Any], name: str) -> float:
    return float(measured.get(name) or 0) / 1e9
